"""Exchanges of buckets, or of their factors, between workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.analysis.gradients.sent_factors import split_counts
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.devices import Device
from mirrorc.ir.links import SumPlace, link_named
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of
from mirrorc.ir.program import Program
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.state.shares.gradient_shares import UnmadeShare, make_pieces
from mirrorc.runtime.state.shares.pieces import FactoredBucket, Visit
from mirrorc.runtime.workers.buckets.factor_messages import FactorMessage, Gathering, NumRows, RowsOf
from mirrorc.runtime.workers.buckets.joint_launches import JointLaunches, Launch
from mirrorc.runtime.workers.buckets.payload import SentPart
from mirrorc.runtime.workers.buckets.sharded_buckets import ShardedBuckets
from mirrorc.runtime.workers.team.team import Team


class Exchanges(Communicator):
    """Exchanges the buckets of a program over gloo.

    Devices first add up their gradients, each its share, in the memory of the worker's first replica. The last device to launch
    sends the whole bucket, or the factors of all devices. All devices launch in the order of the bucket plan, so all workers send
    in this order.

    Args:
        buckets: indices of the exchanged buckets, or numbers of their packs, if buckets are cut.
        made: for each of these buckets, the elements made by each device.
    """

    link = "gloo"

    def __init__(
        self,
        devices: Sequence[Device],
        buckets: Sequence[int],
        launch: Launch,
        timeout_seconds: float,
        messages: Mapping[int, FactorMessage],
        made: Mapping[int, Sequence[tuple[int, int]]],
        rows_of: RowsOf,
        rank: int,
        sharded: ShardedBuckets,
    ) -> None:
        super().__init__(devices, timeout_seconds)
        self._messages, self._made, self._rows_of, self._rank = messages, made, rows_of, rank
        self._joint = JointLaunches(len(devices), buckets, launch, timeout_seconds)
        self._sharded, self._in_words = sharded, {bucket: str(bucket) for bucket in buckets}
        self.release()

    def say_packs(self, bucket_of_pack: Mapping[int, int]) -> None:
        """Makes error messages name packs."""
        self.unit = self._joint.unit = "pack"
        self._in_words = {pack: f"{pack} of bucket {bucket_of_pack[pack]}" for pack in self._in_words}

    def begin_afresh(self) -> None:
        self._joint.begin_afresh()
        self._sharded.begin_afresh()
        self.release()

    def release(self) -> None:
        self._offered: dict[int, list[FactoredBucket | None]] = {
            bucket: [None] * len(self.devices) for bucket in self._messages
        }
        self._gatherings: dict[int, Gathering] = {}
        self._to_send: dict[int, torch.Tensor] = {}
        self._parts: dict[int, SentPart] = {}
        self._sharded.release()

    def memory_to_send(self, bucket: int, num_elements: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self._joint.lock:
            if bucket not in self._to_send:
                self._to_send[bucket] = like.new_empty(num_elements, dtype=dtype)
            return self._to_send[bucket]

    def launch_exchange(self, bucket: int, replica: int, whole: torch.Tensor | None) -> None:
        with self._joint.lock:
            if self._joint.is_last(bucket):
                sent = self._to_send.pop(bucket) if whole is None else whole
                self._joint.send(bucket, (lambda group: group.all_reduce(sent)) if sent.numel() else None)

    def launch_part(self, bucket: int, replica: int, make: Callable[[], SentPart]) -> None:
        with self._joint.lock:
            if self._joint.is_last(bucket):
                part = self._parts[bucket] = make()
                self._joint.send(bucket, part.launch)

    def wait_part(self, bucket: int, replica: int) -> SentPart:
        self._joint.wait(bucket, replica, self._in_words[bucket])
        return self._parts[bucket]

    def launch_gather(self, bucket: int, replica: int, factored_bucket: FactoredBucket) -> None:
        with self._joint.lock:
            offered = self._offered[bucket]
            offered[replica] = factored_bucket
            if not self._joint.is_last(bucket):
                return
            factors = [[list(gradient) for gradient in offer.factors] for offer in offered if offer is not None]
            gathering = Gathering(self._messages[bucket], self._rows_of(bucket), self._rank, factors)
            first = offered[0]
            assert first is not None, "all have launched"
            # what was made of factors lies in the first replica's bucket; the factors themselves have been copied
            self._offered[bucket] = [
                FactoredBucket(first.tensor, (), offer.pieces) for offer in offered if offer is not None
            ]
            self._gatherings[bucket] = gathering
            into = gathering.gathered
            self._joint.send(
                bucket, (lambda group: group.all_gather(gathering.message, into.unbind())) if into.numel() else None
            )

    def wait_factors(self, bucket: int, replica: int, pending: Any) -> Sequence[FactoredBucket]:
        return self.wait_unmade(bucket, replica, pending).buckets

    def wait_gather(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        return self._make(bucket, replica)

    def wait_and_visit(self, bucket: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        return self._make(bucket, replica, visit)

    def wait_unmade(self, bucket: int, replica: int, pending: Any) -> UnmadeShare:
        self._joint.wait(bucket, replica, self._in_words[bucket])
        offered = self._offered[bucket][replica]
        assert offered is not None, "it was launched"
        everyone = [FactoredBucket(offered.tensor, factors, ()) for factors in self._gatherings[bucket].replicas]
        return UnmadeShare(everyone, offered.pieces, *self._made[bucket][replica])

    def _make(self, bucket: int, replica: int, visit: Visit | None = None) -> torch.Tensor:
        share = self.wait_unmade(bucket, replica, None)
        if any(part.factors for part in share.buckets):
            make_pieces(share.pieces, share.buckets, visit)
        return share.buckets[0].tensor[share.start : share.stop]

    def launch_scatter(self, bucket: int, replica: int, whole: torch.Tensor) -> None:
        self._sharded.launch_sums(bucket, whole)

    def wait_scatter(self, bucket: int, replica: int, whole: torch.Tensor, elements: tuple[int, int]) -> torch.Tensor:
        return self._sharded.wait_sums(bucket, replica, whole, *elements)

    def launch_parameters(self, bucket: int, replica: int, whole: torch.Tensor) -> None:
        self._sharded.launch_parameters(bucket, whole)

    def wait_parameters(self, bucket: int, replica: int) -> None:
        self._sharded.wait_parameters(bucket, replica)

    def wait_exchange(self, bucket: int, replica: int, pending: torch.Tensor) -> torch.Tensor:
        self._joint.wait(bucket, replica, self._in_words[bucket])
        return pending

    def abort(self) -> None:
        self._joint.abort()
        self._sharded.abort()


class ExchangesOfGpus(Exchanges):
    """As `Exchanges`, over NCCL. The host waits for each sum; ``end_collectives`` ends those that wait for a lost worker."""

    link = "nccl-workers"
    end_collectives: Callable[[], object]

    def abort(self) -> None:
        super().abort()
        if self._joint.under_way:  # otherwise nothing waits, and the connections can be used again
            self.end_collectives()


_KINDS: Mapping[str, type[Exchanges]] = {kind.link: kind for kind in (Exchanges, ExchangesOfGpus)}


def exchanges_of(program: Program, team: Team | None) -> dict[str, Communicator]:
    """By name of the link; empty if the program has no exchange, or is not to be run.

    Raises:
        ExecutionError: the link has no such runtime, or does not leave sums in memory that can be sent.
    """
    graph = next(iter(program.device_graphs.values())).graph
    launches = list(calls_to(graph, *ops.BETWEEN_WORKERS))
    if not launches or team is None:
        return {}
    links = {str(node.kwargs["link"]) for node in launches}
    if len(links) != 1 or not links <= _KINDS.keys():
        raise ExecutionError(
            f"steps over several workers run over {' or '.join(map(repr, _KINDS))}, not over {', '.join(sorted(links))}"
        )
    kind = _KINDS[links.pop()]
    for node in calls_to(graph, *ops.REDUCTIONS):
        if link_named(node.kwargs["link"]).sum_place is not SumPlace.FIRST:
            raise ExecutionError(
                f"link {node.kwargs['link']!r} does not add up a worker's buckets in one place, from which they can be sent to "
                "the other workers: use link='shared-memory'"
            )
    packs = [pack_of(node) for node in launches if node.target in (*ops.EXCHANGES_OF_SUMS, ops.gather_factors)]
    gathered = [pack_of(node) for node in launches if node.target is ops.gather_factors]
    sent = {pack: program.packs[pack][0] for pack in gathered}
    messages = {pack: FactorMessage(bucket.sent_factors) for pack, bucket in sent.items()}
    number = program.num_replicas
    made = {pack: [bucket.made(replica, number) for replica in range(number)] for pack, bucket in sent.items()}
    sizes = [len(bucket.slots) for bucket in sent.values()]

    def rows_of(bucket: int) -> Sequence[NumRows]:
        place = gathered.index(bucket)
        row_counts = zip(team.row_counts, program.workers.devices_per_worker, strict=True)
        return [split_counts(counts, sizes, num_devices)[place] for counts, num_devices in row_counts]

    launch, seconds = team.launch_bucket, team.timeout_seconds
    rank, num_workers = team.cluster.rank, team.cluster.num_workers
    dealt = [bucket_of(node) for node in launches if node.target is ops.gather_parameters]
    sharded = ShardedBuckets(number, dealt, rank, num_workers, launch, seconds)
    exchanges = kind(program.devices, packs, launch, seconds, messages, made, rows_of, rank, sharded)
    if are_cut(program.buckets):
        exchanges.say_packs({pack.number: bucket.index for bucket, pack in program.packs})
    if isinstance(exchanges, ExchangesOfGpus):
        exchanges.end_collectives = team.connections.cut_buckets
    return {kind.link: exchanges}
