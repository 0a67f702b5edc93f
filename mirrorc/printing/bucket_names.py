"""Names of values in all-reduces by messages, the same on all devices."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts, Part
from mirrorc.ir import ops
from mirrorc.ir.buckets import Pack
from mirrorc.ir.nodes import is_computed, target_name
from mirrorc.ir.program import Program
from mirrorc.ir.routes import Route, replica_at, route_of, sends_in

_CAST = target_name(torch.ops.aten._to_copy.default)
_CLIPS = (target_name(ops.scale), target_name(ops.clip_value))
_Elements = tuple[int, int]


@dataclass(frozen=True)
class SentPart:
    """A message of gradients.

    Attributes:
        unit: the name of the bucket, or of its pack.
        kind: "own" gradients, a "partial" sum, the "sum", or the device's "share" of it.
    """

    route: Route
    unit: str
    elements: _Elements
    kind: str
    is_chunk: bool


@dataclass(frozen=True)
class _Place:
    """Elements of a gradient value within its bucket, and the replicas summed in it."""

    pack: Pack
    unit: str
    elements: _Elements
    kind: str
    steps: tuple[str, ...]

    @property
    def is_chunk(self) -> bool:
        return self.elements != (self.pack.start, self.pack.stop) and self.kind != "share"


class BucketNames:
    """Names by elements and replicas: ``b0_c1_own``, ``b0_c1_received``, ``b0_c1_partial``, ``b0_c1_sum``, ``b0_sum``.

    ``c1`` is chunk 1. If chunks overlap, names have the range of elements: ``b0_0_64_sum``.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._parts = BucketParts(program)

    @functools.cached_property
    def sent(self) -> list[SentPart]:
        sent = []
        for graph in self._program.graphs():
            for send in sorted(sends_in(graph)):
                place = self._place(send.all_input_nodes[0])
                if place is not None:
                    route = route_of(self._program, send)
                    sent.append(SentPart(route, place.unit, place.elements, place.kind, place.is_chunk))
        return sent

    @functools.cached_property
    def _chunks(self) -> dict[str, dict[_Elements, int]]:
        chunks: dict[str, dict[_Elements, int]] = {}
        for sent in self.sent:
            if sent.is_chunk:
                chunks.setdefault(sent.unit, {}).setdefault(sent.elements, sent.route.chunk)
        return {unit: numbers for unit, numbers in chunks.items() if _are_distinct(numbers)}

    def unit(self, node: fx.Node) -> str:
        """The bucket or pack for which ``node`` sends, receives, cuts, adds or joins gradients; empty for other nodes."""
        if node.target is ops.send:
            place = self._place(node.all_input_nodes[0])
            return place.unit if place is not None else ""
        name, place = self.of(node), self._place(self._wait_for(node) or node)
        return place.unit if name and place is not None and not place.steps else ""

    def of(self, node: fx.Node) -> str:
        """Empty for values other than gradients, and for gradients with unknown elements."""
        if node.target is ops.recv:
            wait = self._wait_for(node)
            return f"{self.of(wait).removesuffix('_received')}_incoming" if wait is not None and self.of(wait) else ""
        is_received = node.target is ops.wait and node.all_input_nodes[0].target is ops.recv
        place = self._place(node) if is_received or is_computed(node) else None
        if place is None:
            return ""
        kind = "received" if is_received and place.kind in ("own", "partial") else place.kind
        if place.steps:
            kind = "clipped" if place.steps[-1] in _CLIPS else ""
        where = self.elements_name(place.unit, place.elements) if place.is_chunk else ""
        return kind and "_".join(filter(None, (place.unit, where, kind)))

    def elements_name(self, unit: str, elements: tuple[int, int]) -> str:
        """``c1`` for chunk 1; ``0_64`` if chunks overlap, or a chunk's number stands for several ranges."""
        chunk = self._chunks.get(unit, {}).get(elements)
        return "{}_{}".format(*elements) if chunk is None else f"c{chunk}"

    def num_shared(self, node: fx.Node) -> int | None:
        """The number of elements of all shares, if the node is this device's share of a sum made by messages."""
        place = self._place(node) if self.of(node) else None
        return place.pack.stop - place.pack.start if place is not None and place.kind == "share" else None

    def _wait_for(self, node: fx.Node) -> fx.Node | None:
        waits = (user for user in node.users if user.target is ops.wait) if node.target is ops.recv else ()
        return next(iter(waits), None)

    def _place(self, node: fx.Node) -> _Place | None:
        part = self._parts.of(node)
        elements = _contiguous(part) if part is not None and part.kind == GRADIENTS else None
        if part is None or elements is None:
            return None
        bucket = self._program.buckets[part.bucket]
        packs = (p for p in bucket.launch_units if p.start <= elements[0] and elements[1] <= p.stop)
        pack = next(packs, None)
        if pack is None:
            return None
        replicas = {replica for span in part.spans for replica in span.replicas}
        is_own = replicas == {self._program.workers.first_replica + replica_at(self._program, node)}
        kind = "own" if is_own else "sum" if replicas == {*self._program.local_replicas} else "partial"
        if kind == "sum" and bucket.reduces_by_shares:
            is_share = elements == bucket.share(replica_at(self._program, node), self._program.num_replicas)
            kind = "share" if is_share else kind
        unit = f"b{part.bucket}" + (f"_pack{pack.number}" if bucket.packs else "")
        return _Place(pack, unit, elements, kind, tuple(name for name, _ in part.steps if name != _CAST))


def _contiguous(part: Part) -> _Elements | None:
    if not part.spans or any(one.stop != other.start for one, other in pairwise(part.spans)):
        return None
    return part.spans[0].start, part.spans[-1].stop


def _are_distinct(chunks: dict[_Elements, int]) -> bool:
    overlap = any(one[1] > other[0] for one, other in pairwise(sorted(chunks)))
    return len({*chunks.values()}) == len(chunks) and not overlap
