"""Mutations of how parameters get from the replica that has updated them to the others."""

import operator
from collections.abc import Iterator
from functools import partial

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, origin_of
from mirrorc.ir.program import Program
from mutations.places import (
    all_of_packs_is_used,
    exchange_args_and_order,
    next_like,
    pairs_alike,
    placed_nodes,
    repeat_at_the_end,
    timelines,
    type_of,
    with_argument,
    with_keywords,
)
from mutations.table import Edit, breaks


def is_of_parameters(send: fx.Node) -> bool:
    """Whether a send is of parameters that an optimizer has made."""
    return origin_of(send.all_input_nodes[0]).target is operator.getitem


@breaks
def wait_before_taking_part(program: Program) -> Iterator[Edit]:
    """A device waits for parameters before it launches the reduction without which they cannot be sent."""

    def edit(received: fx.Node, launch: fx.Node) -> None:
        (wait,) = received.users
        launch.prepend(received)
        launch.prepend(wait)

    for module in program.device_graphs.values():
        for received in calls_to(module.graph, ops.recv):
            for launch in calls_to(module.graph, ops.all_reduce):
                if bucket_of(launch) == bucket_of(received):
                    yield partial(edit, received, launch)


@breaks
def broadcast_from_another_replica(program: Program) -> Iterator[Edit]:
    """A broadcast gives what another replica has than the one whose optimizer made it."""
    for node in placed_nodes(program, ops.broadcast):
        yield partial(with_keywords, node, root=(node.kwargs["root"] + 1) % program.num_replicas)  # type: ignore[operator]


@breaks
def drop_a_send(program: Program) -> Iterator[Edit]:
    """Parameters are waited for that nobody sends."""
    for node in placed_nodes(program, ops.send):
        yield partial(node.graph.erase_node, node)


@breaks
def send_twice(program: Program) -> Iterator[Edit]:
    """A bucket's parameters are sent to one replica twice."""
    for node in placed_nodes(program, ops.send):
        yield partial(repeat_at_the_end, node)


@breaks
def drop_a_receipt(program: Program) -> Iterator[Edit]:
    """Parameters are sent that nobody receives; the replica stores the sum of the gradients instead, or nothing."""

    def own_sum(received: fx.Node) -> fx.Node | None:
        (wait,) = received.users
        sums = calls_to(received.graph, ops.wait)
        return next((n for n in sums if n.args[0].target in ops.REDUCTIONS and n.kwargs == wait.kwargs), None)  # type: ignore[union-attr]

    def edit(received: fx.Node, does_store: bool) -> None:
        (wait,) = received.users
        (store,) = wait.users  # parameters are stored; sums of gradients are not
        if does_store:
            with_argument(store, 0, own_sum(received))
        else:
            store.graph.erase_node(store)
        received.graph.erase_node(wait)
        received.graph.erase_node(received)

    for received in placed_nodes(program, ops.recv):
        if all(user.target is ops.store for wait in received.users for user in wait.users):
            is_cut = program.buckets[bucket_of(received)].is_cut  # no wait gives all of the sum
            has_sum = not is_cut and own_sum(received) is not None  # a bucket's owner has it
            yield from (partial(edit, received, does_store) for does_store in ((True, False) if has_sum else (False,)))


@breaks
def send_elsewhere(program: Program) -> Iterator[Edit]:
    """Parameters are sent to another replica than the one that waits for them."""
    for node in placed_nodes(program, ops.send):
        for step in range(1, program.num_replicas + 1):
            destination = (node.kwargs["destination"] + step) % (program.num_replicas + 1)  # type: ignore[operator]
            yield partial(with_keywords, node, destination=destination)


@breaks
def receive_from_elsewhere(program: Program) -> Iterator[Edit]:
    """Parameters are awaited from another replica than the one that sends them."""
    for node in placed_nodes(program, ops.recv):
        for source in range(program.num_replicas + 1):
            if source != node.kwargs["source"]:
                yield partial(with_keywords, node, source=source)


@breaks
def send_too_early(program: Program) -> Iterator[Edit]:
    """Parameters are sent when their gradients are summed, before the optimizer has run."""

    def edit(send: fx.Node, total: fx.Node) -> None:
        with_argument(send, 0, total)
        total.append(send)

    for timeline in timelines(program):
        for send in (node for node in timeline if node.target is ops.send and is_of_parameters(node)):
            sums = [n for n in timeline if n.target is ops.wait and bucket_of(n) == bucket_of(send)]
            yield partial(edit, send, sums[0])


@breaks
def send_the_parameters_of_another(program: Program) -> Iterator[Edit]:
    """Two buckets' parameters of one type are sent as each other's."""

    for timeline in timelines(program) if all_of_packs_is_used(program) else ():
        sends = [node for node in timeline if node.target is ops.send]
        for one, other in pairs_alike(sends, lambda send: (send.kwargs["destination"], type_of(send.args[0]))):  # type: ignore[arg-type]
            yield partial(exchange_args_and_order, one, other)


@breaks
def send_in_another_round(program: Program) -> Iterator[Edit]:
    """A send, or its receipt, is tagged with another chunk or round than the other end."""
    for node in placed_nodes(program, ops.send, ops.recv):
        for name in ("chunk", "round"):
            yield partial(with_keywords, node, **{name: node.kwargs.get(name, 0) + 1})  # type: ignore[operator]


@breaks
def store_what_was_received_for_another(program: Program) -> Iterator[Edit]:
    """Two buckets of one type get each other's parameters."""

    for timeline in timelines(program):
        stores = [node for node in timeline if node.target in (ops.store, ops.store_rows)]
        for one, other in pairs_alike(stores, lambda store: type_of(store.args[0])):  # type: ignore[arg-type]
            yield partial(exchange_args_and_order, one, other)


@breaks
def wait_for_the_parameters_of_another(program: Program) -> Iterator[Edit]:
    """The wait for one bucket's parameters waits for those of another, and they are stored."""
    for timeline in timelines(program):
        received = [node for node in timeline if node.target is ops.recv]
        for node in received:
            other = next_like(node, received)
            for wait in node.users:
                if other is not None and other < wait:
                    yield partial(wait.replace_input_with, node, other)
