"""Mutations of sums that devices make of messages: what is sent, in which round, and what is added where."""

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, is_computed, replica_of, users_of_sum
from mirrorc.ir.program import Program
from mutations.places import (
    all_of_packs_is_used,
    call_graphs,
    exchange_args_and_order,
    exchanged,
    placed_nodes,
    timelines,
    type_of,
    with_argument,
    with_keywords,
)
from mutations.sends import is_of_parameters
from mutations.table import Edit, breaks

aten = torch.ops.aten


def _additions(program: Program) -> Iterator[fx.Node]:
    """Additions of what was received that something takes: a device whose share is empty makes some for nobody."""
    for node in placed_nodes(program, aten.add.Tensor):
        is_of_message = any(_is_received(operand) for operand in node.all_input_nodes)
        if is_of_message and any(not is_computed(user) for user in users_of_sum(node)):
            yield node


def _is_received(value: fx.Node) -> bool:
    return value.target is ops.wait and value.all_input_nodes[0].target is ops.recv


def _messages(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.target is ops.send and not is_of_parameters(node)]


@breaks
def exchange_two_chunks(program: Program) -> Iterator[Edit]:
    """A device sends two values of one type as each other's, under their tags."""

    for timeline in timelines(program) if all_of_packs_is_used(program) else ():
        for one, other in combinations(_messages(timeline), 2):
            if one.args != other.args and type_of(one.args[0]) == type_of(other.args[0]):  # type: ignore[arg-type]
                yield partial(exchange_args_and_order, one, other)


@breaks
def exchange_two_rounds(program: Program) -> Iterator[Edit]:
    """Two sends of one device to another have each other's chunks and rounds."""

    def edit(one: fx.Node, other: fx.Node) -> None:
        tags: list[dict[str, Any]] = [{name: node.kwargs[name] for name in ("chunk", "round")} for node in (one, other)]
        with_keywords(one, **tags[1])
        with_keywords(other, **tags[0])

    for timeline in timelines(program) if all_of_packs_is_used(program) else ():
        for one, other in combinations(_messages(timeline), 2):
            if all(one.kwargs.get(name) == other.kwargs.get(name) for name in ("bucket", "pack", "destination")):
                yield partial(edit, one, other)


@breaks
def wait_for_an_answer_before_sending(program: Program) -> Iterator[Edit]:
    """A device sends its own to another one only when it has what that one sends in answer to it."""
    for module in program.device_graphs.values():
        sends = _messages(list(module.graph.nodes))
        for send in sends:
            answers = [wait for wait in calls_to(module.graph, ops.wait) if _is_received(wait) and _answers(wait, send)]
            for wait in answers[:1]:
                yield partial(wait.append, send)


def _answers(wait: fx.Node, send: fx.Node) -> bool:
    """Whether a device receives from another one, in a later round, what that one could not send without its own."""
    receipt = wait.all_input_nodes[0]
    is_from = receipt.kwargs["source"] == send.kwargs["destination"] and all(
        receipt.kwargs.get(name) == send.kwargs.get(name) for name in ("bucket", "pack")
    )
    return is_from and receipt.kwargs.get("round", 0) > send.kwargs.get("round", 0) and send < wait  # type: ignore[operator]


@breaks
def leave_an_addition_out(program: Program) -> Iterator[Edit]:
    """What is received is not added, or takes the place of the sum."""

    def edit(node: fx.Node, kept: fx.Node) -> None:
        node.replace_all_uses_with(kept)

    for node in _additions(program):
        yield from (partial(edit, node, kept) for kept in node.all_input_nodes)


@breaks
def add_the_same_twice(program: Program) -> Iterator[Edit]:
    """A value is added to itself."""
    for node in _additions(program):
        for place in (0, 1):
            yield partial(with_argument, node, place, node.args[1 - place])


@breaks
def add_on_another_device(program: Program) -> Iterator[Edit]:
    """An addition takes what another device holds, or stands there."""
    for node in _additions(program) if program.graph is not None else ():
        for place, operand in enumerate(node.all_input_nodes):
            for other in node.graph.nodes:
                if other < node and _is_alike(other, operand) and replica_of(other) != replica_of(operand):
                    yield partial(with_argument, node, place, other)
                    break


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    return one.target is other.target and type_of(one) == type_of(other)


@breaks
def join_chunks_in_another_order(program: Program) -> Iterator[Edit]:
    """Chunks of one length lie in another order, in a value that somebody uses; of packs, where a device uses all of it."""
    for graph in call_graphs(program) if all_of_packs_is_used(program) else ():
        for node in graph.nodes:
            chunks: Any = node.args[0] if node.target is aten.cat.default and node.users else ()
            for one, other in combinations(range(len(chunks)), 2):
                if type_of(chunks[one]) == type_of(chunks[other]):
                    yield partial(with_argument, node, 0, exchanged(chunks, one, other))
