"""Collectives of a recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, is_region_call, name_of
from mirrorc.ir.operation import operation_of
from mirrorc.runtime.profiling.recorder import RecordedStep


@dataclass(frozen=True)
class Launch:
    """A device's part in a collective.

    Attributes:
        wait: None on a device that only sends.
        awaited: the launches, as (replica, node), without which the wait cannot end.
    """

    replica: int
    node: fx.Node
    wait: fx.Node | None
    sources: tuple[fx.Node, ...]
    awaited: tuple[tuple[int, fx.Node], ...]


@dataclass(frozen=True)
class Collective:
    """A collective and its launches by replica. A ``send`` and its ``recv`` are one message of ``kind`` ``send``."""

    kind: str
    bucket: int
    link: str
    launches: tuple[Launch, ...]
    pack: int | None = None
    round: int | None = None
    chunk: int | None = None
    source: int | None = None
    destination: int | None = None

    @property
    def is_message(self) -> bool:
        return self.source is not None

    @property
    def label(self) -> str:
        """Such as ``b1 p3 r2 c0 1→2``, with pack, round, chunk and hop."""
        parts = (("b", self.bucket), ("p", self.pack), ("r", self.round), ("c", self.chunk))
        hop = [f"{self.source}→{self.destination}"] if self.is_message else []
        return " ".join([*(f"{letter}{number}" for letter, number in parts if number is not None), *hop])


def collectives_of(step: RecordedStep) -> list[Collective]:
    """In the order of launches, by kind and bucket. Messages are by bucket, pack, round, chunk and hop."""
    groups: dict[tuple[Any, ...], list[tuple[int, fx.Node]]] = {}
    for replica, device_calls in enumerate(step.calls):
        for node in (call.node for call in device_calls):
            if node.target in ops.COLLECTIVES or "link" in node.kwargs:
                name = name_of(node)
                kind = "send" if name == "recv" else name
                key = (kind, bucket_of(node), str(node.kwargs.get("link")))
                part = tuple(node.kwargs.get(word) for word in ("pack", "round", "chunk"))
                groups.setdefault((*key, *part, *_hop(replica, node)), []).append((replica, node))
    return _ordered(
        Collective(kind, bucket, link, tuple(_launch(step, replica, node, members) for replica, node in members), *part)
        for (kind, bucket, link, *part), members in groups.items()
    )


def _hop(replica: int, node: fx.Node) -> tuple[Any, Any]:
    if node.target is ops.send:
        return replica, node.kwargs["destination"]
    return (node.kwargs["source"], replica) if node.target is ops.recv else (None, None)


def _ordered(collectives: Iterable[Collective]) -> list[Collective]:
    by_kind: dict[tuple[str, str], dict[int, list[Collective]]] = {}
    for collective in collectives:
        of_buckets = by_kind.setdefault((collective.kind, collective.link), {})
        of_buckets.setdefault(collective.bucket, []).append(collective)
    ordered: list[Collective] = []
    for of_buckets in by_kind.values():
        for _, of_bucket in sorted(of_buckets.items(), key=_number_of_messages):
            ordered += sorted(of_bucket, key=_place_of_message)
    return ordered


def _number_of_messages(item: tuple[int, Sequence[Collective]]) -> int:
    bucket, collectives = item
    return bucket if collectives[0].is_message else 0


def _place_of_message(message: Collective) -> tuple[int | None, ...]:
    place = (message.pack or 0, message.round or 0, message.chunk or 0, message.source, message.destination)
    return place if message.is_message else ()


def _launch(step: RecordedStep, replica: int, node: fx.Node, members: Sequence[tuple[int, fx.Node]]) -> Launch:
    if node.target is ops.reduce and node.kwargs["root"] != replica:
        members = [(replica, node)]  # the device gets no part of the sum, and does not wait
    giver = None if node.target is ops.reduce else node.kwargs.get("root", node.kwargs.get("source"))
    awaited = [
        (r, n) for r, n in members if giver is None or (r == giver and n.kwargs.get("destination", replica) == replica)
    ]
    wait = next((user for user in node.users if user.target is ops.wait and user in step.call_of), None)
    return Launch(replica, node, wait, tuple(sources_of(node)), tuple(awaited) or ((replica, node),))


def skew_ns(step: RecordedStep, launch: Launch) -> int:
    """How long a device waits for the launches of other devices."""
    if launch.wait is None:
        return 0
    wait = step.call_of[launch.wait]
    last_launch_ns = max(step.call_of[node].end_ns for _, node in launch.awaited)
    return min(wait.end_ns, max(wait.start_ns, last_launch_ns)) - wait.start_ns


def skews_ns(step: RecordedStep, replica: int) -> dict[fx.Node, int]:
    launches = (launch for collective in collectives_of(step) for launch in collective.launches)
    return {x.wait: skew_ns(step, x) for x in launches if x.wait is not None and x.replica == replica}


def sources_of(node: fx.Node) -> Iterator[fx.Node]:
    """Regions, and operations with effects, that compute a node's arguments."""
    for source in node.all_input_nodes:
        operation = operation_of(source.target)
        if is_region_call(source) or (operation is not None and operation.effects):
            yield source
        else:
            yield from sources_of(source)
