"""Mutations of what regions take from backwards of plain PyTorch."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import fx

from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mutations.bodies import region_bodies
from mutations.places import with_argument
from mutations.table import Edit, breaks


def _takes(program: Program) -> Iterator[fx.Node]:
    graphs = program.shard_graphs if program.stage is Stage.CAPTURED else region_bodies(program)
    for graph in graphs:
        yield from calls_to(graph, take_gradient)


@breaks(in_regions=True)
def exchange_two_gradients_that_are_taken(program: Program) -> Iterator[Edit]:
    """Two gradients are taken for each other."""

    def edit(one: fx.Node, other: fx.Node) -> None:
        places = one.args[4], other.args[4]
        with_argument(one, 4, places[1])
        with_argument(other, 4, places[0])

    for one, other in pairwise(_takes(program)):
        if one.args[4] != other.args[4]:
            yield partial(edit, one, other)


@breaks(in_regions=True)
def take_a_gradient_again(program: Program) -> Iterator[Edit]:
    """A gradient is taken twice, and what comes second is used."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_before(node):
            node.graph.call_function(take_gradient, node.args).meta.update(node.meta)

    for node in _takes(program):
        yield partial(edit, node)


@breaks(in_regions=True)
def begin_backward_with_another_tangent(program: Program) -> Iterator[Edit]:
    """A gradient is taken of a backward that begins with another gradient of the loss."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_before(node):
            other = node.graph.call_function(torch.ops.aten.neg.default, (node.args[2],))
        other.meta["val"] = node.args[2].meta["val"]  # type: ignore[union-attr]
        with_argument(node, 2, other)

    for node in list(_takes(program))[1:]:
        yield partial(edit, node)


@breaks(in_regions=True)
def compute_of_which_backward(program: Program) -> Iterator[Edit]:
    """A region copies what says of which backward it takes gradients, so that nobody can wait for it."""

    def edit(body: fx.Graph) -> None:
        for node in list(calls_to(body, take_gradient)):
            with body.inserting_before(node):
                token = body.call_function(torch.ops.aten.clone.default, (node.args[1],))
            token.meta["val"] = node.args[1].meta["val"]  # type: ignore[union-attr]
            with_argument(node, 1, token)

    for body in region_bodies(program):
        if next(calls_to(body, take_gradient), None) is not None:
            yield partial(edit, body)
