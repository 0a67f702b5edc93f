"""Mutations of how regions write into the memory of arguments."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import region_of
from mirrorc.ir.program import Program
from mutations.bodies import is_slot, region_bodies
from mutations.places import call_graphs, is_value, region_calls, type_of
from mutations.table import Edit, breaks, keeps

aten = torch.ops.aten


def _reuses(program: Program) -> Iterator[fx.Node]:
    for body in region_bodies(program):
        for node in body.find_nodes(op="call_function", target=aten.copy_.default):
            written: Any = node.args[0]
            if written.op == "placeholder" and not is_slot(written):
                yield node


def overwritten_values(program: Program) -> set[fx.Node]:
    """The values whose memory a region takes for its results, so that nobody else may use them."""
    written = {node.args[0] for node in _reuses(program)}
    found: set[fx.Node] = set()
    for call in (call for graph in call_graphs(program) for call in region_calls(graph.nodes)):
        arguments = program.regions[region_of(call)].graph_module.graph.find_nodes(op="placeholder")
        found.update(given for own, given in zip(arguments, call.args, strict=True) if own in written)  # type: ignore[misc]
    return found


@breaks(in_regions=True)
def read_what_is_overwritten(program: Program) -> Iterator[Edit]:
    """An operator behind the write into an argument reads the argument, or a view from before the write."""

    def read_a_view(write: fx.Node, user: fx.Node) -> None:
        argument: Any = write.args[0]
        with write.graph.inserting_before(write):
            view = write.graph.call_function(aten.alias.default, (argument,))
        view.meta["val"] = argument.meta["val"]
        user.replace_input_with(write, view)

    for write in _reuses(program):
        for user in list(write.users):
            if user.op == "call_function":
                yield partial(user.replace_input_with, write, write.args[0])
                yield partial(read_a_view, write, user)


@breaks(in_regions=True)
def write_what_others_read(program: Program) -> Iterator[Edit]:
    """A region writes a result into a variable, or into an argument of the step."""

    def edit(value: fx.Node, argument: fx.Node) -> None:
        with value.graph.inserting_after(value):
            written = value.graph.call_function(aten.copy_.default, (argument, value))
        written.meta["val"] = argument.meta["val"]

    for call in (call for graph in call_graphs(program) for call in region_calls(graph.nodes)):
        body = program.regions[region_of(call)].graph_module.graph
        for argument, given in zip(body.find_nodes(op="placeholder"), call.args, strict=True):
            if isinstance(given, fx.Node) and (given.op == "placeholder" or given.target in (ops.read, ops.argument)):
                alike = (
                    n for n in body.nodes if n.op != "placeholder" and is_value(n) and type_of(n) == type_of(argument)
                )
                value = next(alike, None)
                if value is not None:
                    yield partial(edit, value, argument)


@keeps(in_regions=True)
def leave_a_result_in_memory_of_its_own(program: Program) -> Iterator[Edit]:
    """A region does not write a result into the memory of an argument that dies there."""

    def edit(write: fx.Node) -> None:
        write.replace_all_uses_with(write.args[1])  # type: ignore[arg-type]
        write.graph.erase_node(write)

    for write in _reuses(program):
        yield partial(edit, write)
