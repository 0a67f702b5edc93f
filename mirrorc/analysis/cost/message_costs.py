"""The costs of gradient messages in a mirrored graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, is_computed, reached
from mirrorc.ir.program import Program
from mirrorc.ir.routes import Route, route_of, sends_in


@dataclass(frozen=True)
class MessageCosts:
    """Totals of gradient messages.

    Attributes:
        bytes_sent, num_messages: by sending device.
        path_messages: messages on the critical path of a bucket.
        path_bytes: the time of the slowest bucket, in bytes, if a device sends and receives one message at a time.
    """

    bytes_sent: tuple[int, ...]
    num_messages: tuple[int, ...]
    path_messages: int
    path_bytes: int


@dataclass(frozen=True)
class Message:
    """A send of a gradient or partial sum. ``needs`` are the routes of messages from which its value is computed."""

    node: fx.Node
    route: Route
    num_bytes: int
    needs: tuple[Route, ...]


def message_costs(program: Program, buckets: Collection[int] | None = None) -> MessageCosts:
    pending = messages(program, buckets)
    sent, counts = [0] * program.num_replicas, [0] * program.num_replicas
    of_sum: dict[tuple[object, object], list[Message]] = {}
    for message in pending:
        sent[message.route.source] += message.num_bytes
        counts[message.route.source] += 1
        of_sum.setdefault((message.route.bucket, message.node.kwargs.get("pack")), []).append(message)
    lengths = [max(_chains(group).values()) for group in of_sum.values()]
    times = [max(end for _, end in times_of(group).values()) for group in of_sum.values()]
    return MessageCosts(tuple(sent), tuple(counts), max(lengths, default=0), max(times, default=0))


def messages(program: Program, buckets: Collection[int] | None = None) -> list[Message]:
    parts, graph = BucketParts(program), program.mirrored_graph
    pending = []
    for node in sorted(sends_in(graph)):
        part = parts.of(node.args[0])
        if part is None or part.kind != GRADIENTS or (buckets is not None and bucket_of(node) not in buckets):
            continue
        value = node.all_input_nodes[0]
        tensor = value.meta["val"]
        needs = tuple(dict.fromkeys(_received_for(program, value)))
        pending.append(Message(node, route_of(program, node), tensor.numel() * tensor.dtype.itemsize, needs))
    return pending


def _received_for(program: Program, value: fx.Node) -> Iterator[Route]:
    for node in reached([value], lambda user: user.all_input_nodes if is_computed(user) else ()):
        launch = node.all_input_nodes[0] if node.target is ops.wait else None
        if launch is not None and launch.target is ops.recv:
            yield route_of(program, launch)


def _chains(pending: list[Message]) -> dict[Route, int]:
    by_route, lengths = {message.route: message for message in pending}, dict[Route, int]()
    for message in pending:
        waiting = [message]
        while waiting:
            missing = [by_route[route] for route in waiting[-1].needs if route not in lengths]
            if missing:
                waiting += missing
            else:
                done = waiting.pop()
                lengths[done.route] = 1 + max((lengths[route] for route in done.needs), default=0)
    return lengths


def times_of(pending: list[Message]) -> dict[Route, tuple[int, int]]:
    """The start and end of each message of a bucket, in byte times."""
    left, times = list(pending), dict[Route, tuple[int, int]]()
    sender_free: dict[int, int] = {}
    receiver_free: dict[int, int] = {}

    def begin(message: Message) -> int:
        ready = max((times[route][1] for route in message.needs), default=0)
        return max(ready, sender_free.get(message.route.source, 0), receiver_free.get(message.route.destination, 0))

    while left:
        ready = [message for message in left if all(route in times for route in message.needs)]
        chosen = min(ready, key=begin)  # the first one of several
        start = begin(chosen)
        end = start + chosen.num_bytes
        times[chosen.route] = (start, end)
        sender_free[chosen.route.source] = receiver_free[chosen.route.destination] = end
        left.remove(chosen)
    return times
