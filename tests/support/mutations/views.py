"""Mutations of when views of variables are used: a view has the variable's memory, whoever holds it, and whoever made it."""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import region_of
from mirrorc.ir.program import Program, Stage
from mutations.places import call_graphs, region_calls, timelines
from mutations.table import Edit, breaks, keeps

aten = torch.ops.aten
View = Callable[[fx.Node], fx.Node]


def _written(program: Program, node: fx.Node) -> set[str]:
    if node.target is ops.write:
        return {str(node.kwargs["variable"])}
    if node.target not in ops.UPDATES:
        return set()
    indices: Any = node.kwargs["buckets"] if "buckets" in node.kwargs else (node.kwargs["bucket"],)
    return {slot.variable for index in indices for slot in program.buckets[index].slots}


def _applied(value: fx.Node, target: Any, *args: Any) -> fx.Node:
    """An operator on a value, right after it; on an argument of a region, after the last one."""
    after = value.graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value
    with value.graph.inserting_after(after):
        made = value.graph.call_function(target, (value, *args))
    noted = value.meta["val"]
    with (noted[0] if isinstance(noted, list | tuple) else noted).fake_mode:
        made.meta["val"] = target(noted, *args)
    return made


def _shape(value: fx.Node) -> list[int]:
    return list(value.meta["val"].shape)


def _declared(value: fx.Node) -> fx.Node:
    """A view of a view, by operators that declare what they are."""
    return _applied(_applied(value, aten.alias.default), aten.view.default, _shape(value))


def _part(value: fx.Node) -> fx.Node:
    return _applied(_applied(_applied(value, aten.unsqueeze.default, 0), aten.split.Tensor, 1), operator.getitem, 0)


def _part_of_a_part(value: fx.Node) -> fx.Node:
    return _applied(_applied(_part(value), aten.unbind.int), operator.getitem, 0)


def _undeclared(value: fx.Node) -> fx.Node:
    return _applied(value, aten._unsafe_view.default, _shape(value))


def _given_back(value: fx.Node) -> fx.Node:
    """A value by an operator that gives back its argument, as dropout does while nothing is trained."""
    return _applied(value, aten.dropout.default, 0.5, False)


VIEWS: tuple[View, ...] = (_declared, _part, _part_of_a_part, _undeclared, _given_back)


def _use(value: fx.Node, user_goes_after: fx.Node) -> None:
    noted = value.meta["val"]
    with value.graph.inserting_after(max(value, user_goes_after)):
        value.graph.call_function(aten.neg.default, (value,)).meta["val"] = noted


def _use_a_view(view: View, read: fx.Node, user_goes_after: fx.Node) -> None:
    _use(view(read), user_goes_after)


def _late_uses(program: Program, *views: View) -> Iterator[Edit]:
    for timeline in timelines(program) if program.stage >= Stage.UPDATED else ():
        reads = {str(node.kwargs["variable"]): node for node in timeline if node.target is ops.read}
        for node in timeline:
            for name in sorted(_written(program, node) & set(reads)):
                yield from (partial(_use_a_view, view, reads[name], node) for view in views)


@breaks
def use_a_view_of_a_variable_after_it_is_written(program: Program) -> Iterator[Edit]:
    """What an operator outside of regions made of a variable, before it was written, is used afterwards."""
    yield from _late_uses(program, _declared)


@breaks
def use_a_part_of_a_variable_after_it_is_written(program: Program) -> Iterator[Edit]:
    """A variable was split before it was written, and a part of it is used afterwards."""
    yield from _late_uses(program, _part, _part_of_a_part)


@breaks
def use_an_undeclared_view_after_its_variable_is_written(program: Program) -> Iterator[Edit]:
    """An operator that does not declare it gave the memory of a variable, which is written, and used afterwards."""
    yield from _late_uses(program, _undeclared, _given_back)


@keeps
def use_a_view_of_a_variable_before_it_is_written(program: Program) -> Iterator[Edit]:
    """What an operator outside of regions makes of a variable is used before anything is written."""
    for timeline in timelines(program) if program.stage >= Stage.UPDATED else ():
        for node in timeline:
            if node.target is ops.read and not any(_written(program, other) for other in timeline if other < node):
                yield from (partial(_use_a_view, view, node, node) for view in VIEWS)


def _give_a_view(program: Program, view: View, call: fx.Node, place: int, user_goes_after: fx.Node) -> None:
    """A region gives a view of an argument as its last result, and one of its calls has a use of that."""
    body = program.regions[region_of(call)].graph_module.graph
    value, output = view(body.find_nodes(op="placeholder")[place]), body.output_node()
    results: Any = output.args[0]
    output.args = ((*results, value),)
    for graph in call_graphs(program):
        for other in region_calls(graph.nodes):
            if region_of(other) == region_of(call):
                other.meta["val"] = (*other.meta["val"], value.meta["val"])
                part = _applied(other, operator.getitem, len(results))
                if other is call:
                    _use(part, user_goes_after)


def _places_of_variables(program: Program, timeline: list[fx.Node]) -> Iterator[tuple[fx.Node, int, str]]:
    """The arguments of region calls that are variables: the call, the place, the variable."""
    for call in region_calls(timeline):
        for place, given in enumerate(call.args):
            if isinstance(given, fx.Node) and given.target is ops.read:
                yield call, place, str(given.kwargs["variable"])


@breaks(in_regions=True)
def use_a_regions_view_after_its_variable_is_written(program: Program) -> Iterator[Edit]:
    """A region gives a view of a variable, in any of the ways in which there are views, which is used after it was written."""
    for timeline in timelines(program) if program.stage >= Stage.UPDATED else ():
        places = list(_places_of_variables(program, timeline))
        for node in timeline:
            written = _written(program, node)
            for call, place, name in places:
                if name in written:
                    yield from (partial(_give_a_view, program, view, call, place, node) for view in VIEWS)


@keeps(in_regions=True)
def let_a_region_give_a_view_of_a_variable(program: Program) -> Iterator[Edit]:
    """A region gives a view of a variable, which is used at once."""
    for timeline in timelines(program) if program.stage >= Stage.OUTLINED else ():
        for call, place, _ in _places_of_variables(program, timeline):
            yield from (partial(_give_a_view, program, view, call, place, call) for view in VIEWS)
