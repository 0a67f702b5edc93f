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
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.state.shares.pieces import FactoredBucket, UnmadeShare, Visit, make_pieces
from mirrorc.runtime.workers.buckets.factor_messages import FactorMessage, Gathering, NumRows, RowsOf
from mirrorc.runtime.workers.buckets.joint_launches import JointLaunches, Launch
from mirrorc.runtime.workers.buckets.payload import SentPart
from mirrorc.runtime.workers.buckets.sharded_buckets import ShardedBuckets
from mirrorc.runtime.workers.team.team import Team


class Exchanges(Communicator):
    """Exchanges the buckets of a program over gloo.

    Each device first adds up one share of the gradients, in the first replica's memory. The last device to launch sends
    the bucket, or the factors of all devices.

    Args:
        packs: numbers of the exchanged packs, or of the buckets if none is cut.
        made: for each pack of factors, the elements that each device computes, as (start, stop).
    """

    link = "gloo"

    def __init__(
        self,
        devices: Sequence[Device],
        packs: Sequence[int],
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
        self._joint = JointLaunches(len(devices), packs, launch, timeout_seconds)
        self._sharded, self._in_words = sharded, {pack: str(pack) for pack in packs}
        self.reset()

    def say_packs(self, bucket_of_pack: Mapping[int, int]) -> None:
        self.unit = self._joint.unit = "pack"
        self._in_words = {pack: f"{pack} of bucket {bucket_of_pack[pack]}" for pack in self._in_words}

    def begin_afresh(self) -> None:
        self._joint.begin_afresh()
        self._sharded.begin_afresh()
        self.reset()

    def reset(self) -> None:
        self._offered: dict[int, list[FactoredBucket | None]] = {
            pack: [None] * len(self.devices) for pack in self._messages
        }
        self._gatherings: dict[int, Gathering] = {}
        self._to_send: dict[int, torch.Tensor] = {}
        self._parts: dict[int, SentPart] = {}
        self._sharded.reset()

    def memory_to_send(self, pack: int, num_elements: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self._joint.lock:
            if pack not in self._to_send:
                self._to_send[pack] = like.new_empty(num_elements, dtype=dtype)
            return self._to_send[pack]

    def launch_exchange(self, pack: int, whole: torch.Tensor | None) -> None:
        with self._joint.lock:
            if self._joint.is_last(pack):
                sent = self._to_send.pop(pack) if whole is None else whole
                self._joint.send(pack, (lambda group: group.all_reduce(sent)) if sent.numel() else None)

    def launch_part(self, pack: int, replica: int, make: Callable[[], SentPart]) -> None:
        with self._joint.lock:
            if self._joint.is_last(pack):
                part = self._parts[pack] = make()
                self._joint.send(pack, part.launch)

    def wait_part(self, pack: int, replica: int) -> SentPart:
        self._joint.wait(pack, replica, self._in_words[pack])
        return self._parts[pack]

    def launch_gather(self, pack: int, replica: int, factored_bucket: FactoredBucket) -> None:
        with self._joint.lock:
            offered = self._offered[pack]
            offered[replica] = factored_bucket
            if not self._joint.is_last(pack):
                return
            factors = [[list(gradient) for gradient in offer.factors] for offer in offered if offer is not None]
            gathering = Gathering(self._messages[pack], self._rows_of(pack), self._rank, factors)
            first = offered[0]
            assert first is not None, "all have launched"
            # what was made of factors lies in the first replica's bucket; the factors themselves have been copied
            self._offered[pack] = [
                FactoredBucket(first.tensor, (), offer.pieces) for offer in offered if offer is not None
            ]
            self._gatherings[pack] = gathering
            into = gathering.gathered
            self._joint.send(
                pack, (lambda group: group.all_gather(gathering.message, into.unbind())) if into.numel() else None
            )

    def wait_factors(self, pack: int, replica: int, pending: Any) -> Sequence[FactoredBucket]:
        return self.wait_unmade(pack, replica, pending).buckets

    def wait_gather(self, pack: int, replica: int, pending: Any) -> torch.Tensor:
        return self._make(pack, replica)

    def wait_and_visit(self, pack: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        return self._make(pack, replica, visit)

    def wait_unmade(self, pack: int, replica: int, pending: Any) -> UnmadeShare:
        self._joint.wait(pack, replica, self._in_words[pack])
        offered = self._offered[pack][replica]
        assert offered is not None, "it was launched"
        everyone = [FactoredBucket(offered.tensor, factors, ()) for factors in self._gatherings[pack].replicas]
        return UnmadeShare(everyone, offered.pieces, *self._made[pack][replica])

    def _make(self, pack: int, replica: int, visit: Visit | None = None) -> torch.Tensor:
        share = self.wait_unmade(pack, replica, None)
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

    def wait_exchange(self, pack: int, replica: int, pending: torch.Tensor) -> torch.Tensor:
        self._joint.wait(pack, replica, self._in_words[pack])
        return pending

    def abort(self) -> None:
        self._joint.abort()
        self._sharded.abort()


class ExchangesOfGpus(Exchanges):
    """Like `Exchanges`, over NCCL. The CPU waits for each sum; ``end_collectives`` ends sums that wait for a lost
    worker.
    """

    link = "nccl-workers"
    end_collectives: Callable[[], object]

    def abort(self) -> None:
        super().abort()
        if self._joint.under_way:  # otherwise nothing waits, and the connections can be used again
            self.end_collectives()


_KINDS: Mapping[str, type[Exchanges]] = {kind.link: kind for kind in (Exchanges, ExchangesOfGpus)}


def exchanges_of(program: Program, team: Team | None) -> dict[str, Communicator]:
    """Communicators between workers, by link; empty without exchanges or without a team.

    Raises:
        ExecutionError: the link between workers is unknown, or the devices' link has no common sum.
    """
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
