"""Mutations of operators: in regions, in the captured graph, and between operations of the IR."""

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.custom_ops import out_products
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.program import Program, Stage
from mutations.places import (
    bodies,
    bypass,
    insert_like,
    is_value,
    next_like,
    pairs_alike,
    placed_nodes,
    type_of,
    with_argument,
)
from mutations.table import Edit, breaks

aten = torch.ops.aten


def region_bodies(program: Program) -> list[fx.Graph]:
    return [region.graph_module.graph for region in program.regions.values()]


def _results(graph: fx.Graph) -> tuple[Any, ...]:
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]


def is_slot(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("slot_")


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _operators(graph: fx.Graph) -> list[fx.Node]:
    """The operators that give a floating-point tensor of their own."""
    return [node for node in graph.nodes if is_compute(node) and _is_float(node) and not _writes(node)]


def _writes(node: fx.Node) -> bool:
    return is_compute(node) and node.target._schema.is_mutable  # type: ignore[union-attr]


@breaks(in_regions=True)
def let_a_region_give_another_shape(program: Program) -> Iterator[Edit]:
    """A region computes a result of another shape than its callers expect."""

    def edit(graph: fx.Graph, place: int) -> None:
        results, output = _results(graph), graph.output_node()
        with graph.inserting_before(output):
            made = graph.call_function(aten.unsqueeze.default, (results[place], 0))
        made.meta["val"] = results[place].meta["val"].unsqueeze(0)
        output.args = ((*results[:place], made, *results[place + 1 :]),)

    for graph in region_bodies(program):
        for place, result in enumerate(_results(graph)):
            if isinstance(result.meta.get("val"), torch.Tensor):
                yield partial(edit, graph, place)


@breaks(in_regions=True, is_judged=True)
def compute_something_else(program: Program) -> Iterator[Edit]:
    """An operator of a region, or of the captured graph, is followed by another that keeps its type and not its value."""
    for graph in bodies(program):
        for node in _operators(graph):
            yield partial(insert_like, node, aten.cos.default)  # not neg: a square would be the same


@breaks(in_regions=True, is_judged=True)
def give_an_operator_another_operand(program: Program) -> Iterator[Edit]:
    """An operator of a region, or of the captured graph, takes another value of that type."""
    for graph in bodies(program):
        values = [node for node in graph.nodes if is_value(node) and not is_slot(node)]
        for node in _operators(graph):
            for place, given in enumerate(node.args):
                if isinstance(given, fx.Node) and is_value(given):
                    other = next_like(given, [value for value in values if value < node])
                    if other is not None:
                        yield partial(with_argument, node, place, other)


@breaks(in_regions=True, is_judged=True)
def exchange_results_of_a_region(program: Program) -> Iterator[Edit]:
    """A region gives two results of one type in each other's places."""

    def edit(graph: fx.Graph, one: int, other: int) -> None:
        results = list(_results(graph))
        results[one], results[other] = results[other], results[one]
        graph.output_node().args = (tuple(results),)

    for graph in region_bodies(program):
        results = _results(graph)
        for one, other in pairs_alike(range(len(results)), lambda place, results=results: type_of(results[place])):  # type: ignore[misc]
            yield partial(edit, graph, one, other)


@breaks(in_regions=True)
def forget_to_write_a_slot(program: Program) -> Iterator[Edit]:
    """A region gives a slot as its gradient, and has written nothing into it."""

    for graph in region_bodies(program):
        for node in list(graph.nodes):
            if _writes(node) and is_slot(node.args[0]):
                yield partial(bypass, node)


@breaks(in_regions=True)
def write_into_each_others_slots(program: Program) -> Iterator[Edit]:
    """A region computes two gradients of one type into each other's slots."""

    def edit(one: fx.Node, other: fx.Node) -> None:
        mine, theirs = one.args[0], other.args[0]
        with_argument(one, 0, theirs)
        with_argument(other, 0, mine)

    for graph in region_bodies(program):
        written = [node for node in graph.nodes if node.target is out_products.mm_into]
        for one, other in pairs_alike(written, lambda node: type_of(node.args[0])):
            yield partial(edit, one, other)


@breaks(in_regions=True)
def write_an_argument(program: Program) -> Iterator[Edit]:
    """An operator writes what it is given in place, such as a parameter in the middle of the step."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_before(next(iter(node.users))):
            made = node.graph.call_function(aten.cos_.default, (node,))
        made.meta["val"] = node.meta["val"]

    for graph in bodies(program):
        for node in graph.nodes:
            is_given = node.op == "placeholder" or node.target is ops.read
            if is_given and node.users and _is_float(node) and not is_slot(node):
                yield partial(edit, node)


@breaks
def call_what_is_no_operation(program: Program) -> Iterator[Edit]:
    """A value goes through a function of Python, or an operator that writes it, between operations of the IR."""

    def edit(node: fx.Node, target: Any) -> None:
        made = insert_like(node, target, 1.0)
        assert made.users

    for node in placed_nodes(program, ops.wait, ops.pack, operator.getitem):
        if program.stage >= Stage.OUTLINED and node.users and _is_float(node):
            yield from (partial(edit, node, target) for target in (operator.mul, aten.mul_.Tensor))


@breaks
def use_a_value_before_it_is_there(program: Program) -> Iterator[Edit]:
    """A node stands before one of its arguments."""
    for graph in program.graphs():
        for node in graph.nodes:
            if node.op == "call_function" and node.all_input_nodes:
                yield partial(max(node.all_input_nodes).prepend, node)
