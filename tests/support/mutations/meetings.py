"""Mutations of what replicas ask each other in forward and backward."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.program import Program, Stage
from mutations.places import bypass, placed_nodes, timelines, with_keywords
from mutations.table import Edit, breaks


@breaks
def meet_under_another_number(program: Program) -> Iterator[Edit]:
    """A replica meets the others under a number that is another meeting's, or nobody's."""
    if program.stage >= Stage.REPLICATED and program.num_replicas > 1:
        for node in placed_nodes(program, *ops.MEETINGS):
            yield partial(with_keywords, node, number=int(str(node.kwargs["number"])) + 1)


@breaks
def exchange_two_meetings(program: Program) -> Iterator[Edit]:
    """A replica takes the numbers of two meetings for each other."""

    def edit(one: fx.Node, other: fx.Node) -> None:
        numbers = one.kwargs["number"], other.kwargs["number"]
        with_keywords(one, number=numbers[1])
        with_keywords(other, number=numbers[0])

    for timeline in timelines(program):
        met = [node for node in timeline if node.target in ops.MEETINGS]
        for one, other in pairwise(met):
            yield partial(edit, one, other)


@breaks
def leave_a_meeting_out(program: Program) -> Iterator[Edit]:
    """A replica goes on with its own value, and the others wait for it."""

    if program.num_replicas > 1:
        for node in placed_nodes(program, ops.sum_over_replicas):
            yield partial(bypass, node)


@breaks
def meet_with_another_value(program: Program) -> Iterator[Edit]:
    """A replica meets the others with twice its value."""

    def edit(node: fx.Node) -> None:
        (given,) = node.all_input_nodes
        with node.graph.inserting_before(node):
            twice = node.graph.call_function(torch.ops.aten.add.Tensor, (given, given))
        twice.meta["val"] = given.meta["val"]
        node.replace_input_with(given, twice)

    for node in placed_nodes(program, *ops.MEETINGS):
        yield partial(edit, node)


@breaks
def gather_fewer_rows(program: Program) -> Iterator[Edit]:
    """A replica gathers all rows of its value but one."""

    def edit(node: fx.Node) -> None:
        (given,) = node.all_input_nodes
        size = len(given.meta["val"])
        with node.graph.inserting_before(node):
            fewer = node.graph.call_function(torch.ops.aten.slice.Tensor, (given, 0, 0, size - 1))
        fewer.meta["val"] = given.meta["val"][: size - 1]
        node.replace_input_with(given, fewer)

    if program.stage >= Stage.REPLICATED:
        for node in placed_nodes(program, ops.rows_of_replicas):
            yield partial(edit, node)
