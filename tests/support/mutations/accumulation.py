"""Mutations of how gradients are added over calls."""

from collections.abc import Iterator
from functools import partial

from mirrorc.ir import ops
from mirrorc.ir.program import Accumulation, Program
from mutations.places import placed_nodes, repeat
from mutations.table import Edit, breaks


@breaks
def accumulate_twice(program: Program) -> Iterator[Edit]:
    """What a replica has packed is added to its sums twice, or they are added to it twice."""
    for node in placed_nodes(program, ops.accumulate, ops.add_accumulated):
        yield partial(repeat, node)


@breaks
def accumulate_nothing(program: Program) -> Iterator[Edit]:
    """What a replica has packed is not added to its sums."""
    for node in placed_nodes(program, ops.accumulate):
        yield partial(node.graph.erase_node, node)


@breaks
def forget_what_was_accumulated(program: Program) -> Iterator[Edit]:
    """A bucket is reduced as it was packed."""
    for node in placed_nodes(program, ops.add_accumulated):
        yield partial(node.replace_all_uses_with, node.args[0])


@breaks
def accumulate_another_bucket(program: Program) -> Iterator[Edit]:
    """A bucket's sum is taken for that of another one, or of another replica."""
    nodes = list(placed_nodes(program, ops.accumulate, ops.add_accumulated, ops.add_to_grad))
    for node in nodes:
        for other in nodes:
            if other.graph is node.graph and other is not node and other.target is node.target:
                yield partial(_exchange, node, other)
                break


def _exchange(node: object, other: object) -> None:
    node.kwargs, other.kwargs = other.kwargs, node.kwargs  # type: ignore[attr-defined]


@breaks
def leave_gradients_otherwise(program: Program) -> Iterator[Edit]:
    """A bucket is added to the user's gradients twice, or not at all."""
    for node in placed_nodes(program, ops.add_to_grad):
        yield partial(repeat, node)
        yield partial(node.graph.erase_node, node)


@breaks
def take_a_program_for_another_kind(program: Program) -> Iterator[Edit]:
    """A program of one kind, such as one that accumulates, is taken for one of another kind."""
    for kind in Accumulation if program.buckets and program.stage.name in ("UPDATED", "SCHEDULED", "LOWERED") else ():
        if kind is not program.accumulation:
            yield partial(program.evolve, accumulation=kind)
