"""Mutations of what a step checks before it changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mutations.places import next_like, placed_nodes, timelines, with_argument, with_keywords
from mutations.table import Edit, breaks


@breaks
def drop_a_check(program: Program) -> Iterator[Edit]:
    """A check is not made."""
    for node in placed_nodes(program, ops.check):
        yield partial(node.graph.erase_node, node)


@breaks
def check_another_value(program: Program) -> Iterator[Edit]:
    """A check looks at the condition of another one."""
    for timeline in timelines(program):
        checks = [node for node in timeline if node.target is ops.check]
        conditions = [node.all_input_nodes[0] for node in checks]
        for node in checks:
            other = next_like(node.all_input_nodes[0], conditions)
            if other is not None and other is not node.all_input_nodes[0]:
                yield partial(with_argument, node, 0, other)


@breaks
def check_with_another_text(program: Program) -> Iterator[Edit]:
    """A check says something else when it fails."""
    for node in placed_nodes(program, ops.check):
        yield partial(with_keywords, node, text="something else")


@breaks
def check_after_everything(program: Program) -> Iterator[Edit]:
    """A check comes at the end, when others may have updated parameters."""
    for node in placed_nodes(program, ops.check):
        if any(n.target in ops.LAUNCHES or n.target in ops.UPDATES for n in node.graph.nodes):
            yield partial(node.graph.output_node().prepend, node)
