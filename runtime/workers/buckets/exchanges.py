"""Exchanges of buckets, or of their factors, between workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.analysis.gradients.sent_factors import split_counts
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.buckets import RowType, SentFactors, are_cut
from mirrorc.ir.devices import Device
from mirrorc.ir.gradient_forms import form_named
from mirrorc.ir.links import SumPlace, link_named
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.state.shares.pieces import FactoredBucket, Factors, UnmadeShare, Visit, make_pieces
from mirrorc.runtime.workers.buckets.joint_launches import JointLaunches, Launch
from mirrorc.runtime.workers.buckets.payload import SentPart
from mirrorc.runtime.workers.team.team import Team

_ALIGNMENT = 64  # bytes: factors begin at one place of a cache line on all workers, so that products have equal bits

NumRows = Sequence[Sequence[Sequence[int]]]
"""Numbers of rows in one worker, by gradient, replica and microbatch."""
ReplicaFactors = list[list[Factors]]
"""A replica's factors, by gradient and microbatch; empty without examples."""


@dataclass(frozen=True)
class FactorMessage:
    """The rows of all factors of a worker's replicas, concatenated."""

    gradients: Sequence[SentFactors]

    def num_bytes(self, num_rows: NumRows) -> int:
        return sum(_aligned(number * kind.num_bytes) for *_, number, kind in self._pieces(num_rows))

    def views(self, message: torch.Tensor, num_rows: NumRows) -> list[list[list[list[torch.Tensor]]]]:
        """Views of the rows in a message, [bytes] uint8: by replica, gradient, microbatch and factor."""
        num_replicas = len(num_rows[0])
        views: list[list[list[list[torch.Tensor]]]] = [
            [[[] for _ in worker_rows[replica]] for worker_rows in num_rows] for replica in range(num_replicas)
        ]
        start = 0
        for replica, place, part, number, kind in self._pieces(num_rows):
            stop = start + number * kind.num_bytes
            rows = message[start:stop].view(kind.dtype).view(number, *kind.shape)
            views[replica][place][part].append(rows)
            start += _aligned(stop - start)
        return views

    def _pieces(self, num_rows: NumRows) -> Iterator[tuple[int, int, int, int, RowType]]:
        """Replica, gradient, microbatch, number of rows and their type, by factor."""
        for replica in range(len(num_rows[0])):
            for place, gradient in enumerate(self.gradients):
                for part, number in enumerate(num_rows[place][replica]):
                    for kind in gradient.rows:
                        yield replica, place, part, number, kind

    def write(self, message: torch.Tensor, num_rows: NumRows, replicas: Sequence[ReplicaFactors]) -> None:
        for shard, places in zip(replicas, self.views(message, num_rows), strict=True):
            for gradient, parts, into in zip(self.gradients, shard, places, strict=True) if shard else ():
                for factors, rows in zip(parts, into, strict=True):
                    matrices = form_named(gradient.operation).to_rows(factors)
                    assert matrices is not None, "the form is sent"
                    for to, source in zip(rows, matrices, strict=True):
                        to.copy_(source)

    def read(self, message: torch.Tensor, num_rows: NumRows) -> list[ReplicaFactors]:
        return [
            [
                [form_named(gradient.operation).from_rows(rows) for rows in parts]
                for gradient, parts in zip(self.gradients, replica_views, strict=True)
            ]
            if any(replica_views)
            else []
            for replica_views in self.views(message, num_rows)
        ]


class Gathering:
    """An all-gather of factor messages. ``num_rows`` is by rank."""

    def __init__(
        self, message: FactorMessage, num_rows: Sequence[NumRows], rank: int, replicas: Sequence[ReplicaFactors]
    ) -> None:
        self._layout, self._num_rows = message, num_rows
        length = max(map(message.num_bytes, num_rows))
        self.gathered = torch.empty(len(num_rows), length, dtype=torch.uint8)
        self.message = torch.empty(length, dtype=torch.uint8)
        message.write(self.message, num_rows[rank], replicas)

    @functools.cached_property
    def replicas(self) -> list[ReplicaFactors]:
        """Factors of all workers' replicas, by rank, once the all-gather is done."""
        each = zip(self.gathered.unbind(), self._num_rows, strict=True)
        return [replica for message, num_rows in each for replica in self._layout.read(message, num_rows)]


RowsOf = Callable[[int], Sequence[NumRows]]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_SUMS, _PARAMETERS = "sums", "parameters"


class Exchanges(Communicator):
    """Exchanges the buckets of a program over gloo.

    Each device first adds up one share of the gradients, in the first replica's memory. The last device to launch sends
    the bucket, or the factors of all devices.

    Buckets whose updates are sharded over workers are sent in shards of equal length, in the order of ranks: gradients
    by an all_to_all, whose parts are added in the order of ranks. This sends half the bytes of an all_reduce; gloo's
    reduce_scatter is slower. New parameters are sent by an all_gather.

    Args:
        packs: the exchanged packs, or the buckets if none is cut: a name for messages, by number.
        made: for each pack of factors, the elements that each device computes, as (start, stop).
    """

    link = "gloo"

    def __init__(
        self,
        devices: Sequence[Device],
        packs: Mapping[int, str],
        launch: Launch,
        timeout_seconds: float,
        messages: Mapping[int, FactorMessage],
        made: Mapping[int, Sequence[tuple[int, int]]],
        rows_of: RowsOf,
        rank: int,
        num_workers: int,
        sharded: Sequence[int] = (),
    ) -> None:
        super().__init__(devices, timeout_seconds)
        self._messages, self._made, self._rows_of = messages, made, rows_of
        self._rank, self._num_workers = rank, num_workers
        shards = {(kind, bucket): f"bucket {bucket}" for kind in (_SUMS, _PARAMETERS) for bucket in sharded}
        self._names: dict[Any, str] = {**packs, **shards}
        self._joint = JointLaunches(len(devices), self._names, launch, timeout_seconds)
        self.reset()

    def begin_afresh(self) -> None:
        self._joint.begin_afresh()
        self.reset()

    def reset(self) -> None:
        self._offered: dict[int, list[FactoredBucket | None]] = {
            pack: [None] * len(self.devices) for pack in self._messages
        }
        self._gatherings: dict[int, Gathering] = {}
        self._to_send: dict[int, torch.Tensor] = {}
        self._parts: dict[int, SentPart] = {}
        self._received: dict[int, torch.Tensor] = {}  # gradients of sharded buckets
        self._num_waiting: dict[int, int] = {}

    def abort(self) -> None:
        self._joint.abort()

    def _wait(self, tag: Hashable, replica: int) -> None:
        self._joint.wait(tag, replica, self._names[tag])

    def memory_to_send(self, pack: int, num_elements: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """1-D memory for `launch_exchange`, on the device of ``like``. Replicas share it until all have launched."""
        with self._joint.lock:
            if pack not in self._to_send:
                self._to_send[pack] = like.new_empty(num_elements, dtype=dtype)
            return self._to_send[pack]

    def launch_exchange(self, pack: int, whole: torch.Tensor | None) -> None:
        """Submits this replica's part of ``whole``, a 1-D sum; None if it is in the memory of `memory_to_send`."""
        with self._joint.lock:
            if self._joint.is_last(pack):
                sent = self._to_send.pop(pack) if whole is None else whole
                self._joint.send(pack, (lambda group: group.all_reduce(sent)) if sent.numel() else None)

    def wait_exchange(self, pack: int, replica: int, pending: torch.Tensor) -> torch.Tensor:
        self._wait(pack, replica)
        return pending

    def launch_part(self, pack: int, replica: int, make: Callable[[], SentPart]) -> None:
        """Submits this replica's elements of a pack. The last replica's launch calls ``make``."""
        with self._joint.lock:
            if self._joint.is_last(pack):
                part = self._parts[pack] = make()
                self._joint.send(pack, part.launch)

    def wait_part(self, pack: int, replica: int) -> SentPart:
        self._wait(pack, replica)
        return self._parts[pack]

    def launch_gather(self, pack: int, replica: int, factored_bucket: FactoredBucket) -> None:
        with self._joint.lock:
            offered = self._offered[pack]
            offered[replica] = factored_bucket
            if not self._joint.is_last(pack):
                return
            offers = [offer for offer in offered if offer is not None]  # all have launched
            factors = [[list(gradient) for gradient in offer.factors] for offer in offers]
            gathering = Gathering(self._messages[pack], self._rows_of(pack), self._rank, factors)
            # what was made of factors lies in the first replica's bucket; the factors themselves have been copied
            self._offered[pack] = [FactoredBucket(offers[0].tensor, (), offer.pieces) for offer in offers]
            self._gatherings[pack] = gathering
            into = gathering.gathered
            self._joint.send(
                pack, (lambda group: group.all_gather(gathering.message, into.unbind())) if into.numel() else None
            )

    def wait_gather(self, pack: int, replica: int, visit: Visit | None = None) -> torch.Tensor:
        """This replica's elements of the sum over all workers' replicas, computed from factors."""
        share = self.wait_unmade(pack, replica, None)
        if any(part.factors for part in share.buckets):
            make_pieces(share.pieces, share.buckets, visit)
        return share.buckets[0].tensor[share.start : share.stop]

    def wait_factors(self, pack: int, replica: int, pending: Any) -> Sequence[FactoredBucket]:
        return self.wait_unmade(pack, replica, pending).buckets

    def wait_and_visit(self, pack: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        return self.wait_gather(pack, replica, visit)

    def wait_unmade(self, pack: int, replica: int, pending: Any) -> UnmadeShare:
        self._wait(pack, replica)
        offered = self._offered[pack][replica]
        assert offered is not None, "it was launched"
        everyone = [FactoredBucket(offered.tensor, factors, ()) for factors in self._gatherings[pack].replicas]
        return UnmadeShare(everyone, offered.pieces, *self._made[pack][replica])

    def launch_scatter(self, bucket: int, whole: torch.Tensor) -> None:
        with self._joint.lock:
            if self._joint.is_last((_SUMS, bucket)):
                received = torch.empty_like(whole)
                self._received[bucket] = received.view(self._num_workers, -1)
                self._num_waiting[bucket] = len(self.devices)
                self._joint.send((_SUMS, bucket), lambda group: group.all_to_all(whole, received))

    def wait_scatter(self, bucket: int, replica: int, whole: torch.Tensor, elements: tuple[int, int]) -> torch.Tensor:
        """Writes the sum over workers of ``elements``, a half-open range, into ``whole``; returns these elements."""
        self._wait((_SUMS, bucket), replica)
        start, stop = elements
        share, received = whole[start:stop], self._received[bucket]
        first = self._rank * received.shape[1]
        parts = received[:, start - first : stop - first].unbind()
        torch.add(parts[0], parts[1], out=share)
        for part in parts[2:]:
            share.add_(part)
        with self._joint.lock:
            self._num_waiting[bucket] -= 1
            if not self._num_waiting[bucket]:
                del self._received[bucket]
        return share

    def launch_parameters(self, bucket: int, whole: torch.Tensor) -> None:
        """Submits this replica's share of ``whole``, the 1-D parameters, which gets other workers' shards later."""
        with self._joint.lock:
            if self._joint.is_last((_PARAMETERS, bucket)):
                parts = whole.view(self._num_workers, -1).unbind()
                part = parts[self._rank].clone()  # a copy, as the all-gather writes the whole bucket
                self._joint.send((_PARAMETERS, bucket), lambda group: group.all_gather_whole(part, whole))

    def wait_parameters(self, bucket: int, replica: int) -> None:
        self._wait((_PARAMETERS, bucket), replica)


class ExchangesOfGpus(Exchanges):
    """`Exchanges` over NCCL. The CPU waits for each sum; ``end_collectives`` ends those that wait for a lost worker."""

    link = "nccl-workers"
    end_collectives: Callable[[], object]

    def abort(self) -> None:
        super().abort()
        if self._joint.under_way:  # otherwise nothing waits, and the connections can be used again
            self.end_collectives()


_KINDS: Mapping[str, type[Exchanges]] = {kind.link: kind for kind in (Exchanges, ExchangesOfGpus)}


def exchanges_of(program: Program, team: Team | None) -> dict[str, Exchanges]:
    """Communicators between workers, by link; empty without exchanges or without a team."""
    graph = next(iter(program.device_graphs.values())).graph
    launches = list(calls_to(graph, *ops.BETWEEN_WORKERS))
    if not launches or team is None:
        return {}
    links = {str(node.kwargs["link"]) for node in launches}
    if len(links) != 1 or not links <= _KINDS.keys():
        raise problem(
            ExecutionError,
            f"MC1104: steps over several workers cannot run over {', '.join(sorted(links))}",
            fix=f"link={' or '.join(map(repr, _KINDS))}",
        )
    kind = _KINDS[links.pop()]
    for node in calls_to(graph, *ops.REDUCTIONS):
        if link_named(node.kwargs["link"]).sum_place is not SumPlace.FIRST:
            raise problem(
                ExecutionError,
                f"MC1104: link {node.kwargs['link']!r} cannot be used by one of several workers",
                "it leaves no sum of the worker's devices in one place, to be sent to other workers",
                "communication=mirrorc.Communication(link='shared-memory')",
            )
    packs = [pack_of(node) for node in launches if node.target in (*ops.EXCHANGES_OF_SUMS, ops.gather_factors)]
    gathered = [pack_of(node) for node in launches if node.target is ops.gather_factors]
    sent = {pack: program.packs[pack][0] for pack in gathered}
    messages = {pack: FactorMessage(bucket.sent_factors) for pack, bucket in sent.items()}
    number = program.num_replicas
    made = {pack: [bucket.made(replica, number) for replica in range(number)] for pack, bucket in sent.items()}
    sizes = [len(bucket.slots) for bucket in sent.values()]

    def rows_of(pack: int) -> Sequence[NumRows]:
        place = gathered.index(pack)
        row_counts = zip(team.row_counts, program.workers.devices_per_worker, strict=True)
        return [split_counts(counts, sizes, num_devices)[place] for counts, num_devices in row_counts]

    def name_of_pack(number: int) -> str:
        is_cut = are_cut(program.buckets)
        return f"pack {number} of bucket {program.packs[number][0].index}" if is_cut else f"bucket {number}"

    exchanges = kind(
        program.devices,
        {pack: name_of_pack(pack) for pack in packs},
        team.launch_bucket,
        team.timeout_seconds,
        messages,
        made,
        rows_of,
        team.cluster.rank,
        team.cluster.num_workers,
        [bucket_of(node) for node in launches if node.target is ops.gather_parameters],
    )
    if isinstance(exchanges, ExchangesOfGpus):
        exchanges.end_collectives = team.connections.cut_buckets
    return {kind.link: exchanges}
