"""Mutations of when views of variables are used: a view outside of regions has the variable's memory, whoever holds it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.program import Program, Stage
from mutations.places import timelines
from mutations.table import Edit, breaks, keeps

aten = torch.ops.aten


def _written(program: Program, node: fx.Node) -> set[str]:
    """The variables that a node writes."""
    if node.target is ops.write:
        return {str(node.kwargs["variable"])}
    if node.target not in ops.UPDATES:
        return set()
    indices: Any = node.kwargs["buckets"] if "buckets" in node.kwargs else (node.kwargs["bucket"],)
    return {slot.variable for index in indices for slot in program.buckets[index].slots}


def _use_a_view(read: fx.Node, user_goes_after: fx.Node) -> None:
    """Views of a view of a variable, right after it is read; something that is computed of it, later."""
    kind = read.meta["val"]
    view = read
    for target, args in ((aten.alias.default, ()), (aten.view.default, (list(kind.shape),))):
        with read.graph.inserting_after(view):
            view = read.graph.call_function(target, (view, *args))
        view.meta["val"] = kind
    with read.graph.inserting_after(max(view, user_goes_after)):
        read.graph.call_function(aten.neg.default, (view,)).meta["val"] = kind


@breaks
def use_a_view_of_a_variable_after_it_is_written(program: Program) -> Iterator[Edit]:
    """What an operator outside of regions made of a variable, before it was written, is used afterwards."""
    for timeline in timelines(program) if program.stage >= Stage.UPDATED else ():
        reads = {str(node.kwargs["variable"]): node for node in timeline if node.target is ops.read}
        for node in timeline:
            for name in sorted(_written(program, node) & set(reads)):
                yield partial(_use_a_view, reads[name], node)


@keeps
def use_a_view_of_a_variable_before_it_is_written(program: Program) -> Iterator[Edit]:
    """What an operator outside of regions makes of a variable is used before anything is written."""
    for timeline in timelines(program) if program.stage >= Stage.UPDATED else ():
        for node in timeline:
            if node.target is ops.read and not any(_written(program, other) for other in timeline if other < node):
                yield partial(_use_a_view, node, node)
