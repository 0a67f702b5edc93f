"""Mutations of the memory that is reserved for results of regions."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mutations.places import call_graphs, with_keywords
from mutations.table import Edit, breaks


def _reserved(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    for graph in call_graphs(program):
        for node in calls_to(graph, ops.reserved):
            yield node, next(iter(node.users))


@breaks
def put_two_values_into_one_memory(program: Program) -> Iterator[Edit]:
    """Two results of one call lie in the same reserved memory."""

    for one, call in _reserved(program):
        for other in call.args:
            if other is not one and getattr(other, "target", None) is ops.reserved:
                yield partial(with_keywords, one, number=other.kwargs["number"])  # type: ignore[union-attr]


@breaks
def look_at_reserved_memory(program: Program) -> Iterator[Edit]:
    """An operator outside of regions reads what is in reserved memory."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_before(node.graph.output_node()):
            node.graph.call_function(torch.ops.aten.neg.default, (node,)).meta["val"] = node.meta["val"]

    for node, _ in _reserved(program):
        yield partial(edit, node)
