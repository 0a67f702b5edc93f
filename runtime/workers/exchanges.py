"""Exchanges of buckets, or of their factors, with the other workers: the devices of this one launch them together, and wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.analysis.sent_factors import split_counts
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.links import SumPlace, link_named
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.ir.shares import share_bounds
from mirrorc.runtime.communication import Aborted, Communicator
from mirrorc.runtime.state.gradient_shares import make_pieces
from mirrorc.runtime.state.share_pieces import FactoredBucket, Visit
from mirrorc.runtime.workers.factor_messages import FactorMessage, Gathering, NumRows, RowsOf
from mirrorc.runtime.workers.lane import Done, LostConnectionError, in_words
from mirrorc.runtime.workers.team import Team
from mirrorc.torch_internals import GlooGroup

Launch = Callable[[Callable[[GlooGroup], object], Done], None]
_SLACK_SECONDS = 2.0  # what a lane waits for ends by itself; its text says more than ours


class Exchanges(Communicator):
    """Exchanges the buckets of one program over gloo.

    Devices add up their gradients first, each its share, in the memory of the worker's first replica. When all of them have
    launched an exchange, the whole bucket lies there, and whoever launched last sends it. Every device launches in the order of
    the bucket plan, so buckets are sent in this order, too, as on all other workers.

    Of a bucket that is sent as factors, nothing is added up first: whoever launches last puts the factors of all devices into one
    message. When all workers' messages are there, each device makes its share from the factors of all replicas.

    Args:
        devices: of this worker.
        buckets: the indices of those that are exchanged.
        launch: launches a collective between the workers, as `mirrorc.runtime.workers.lane.Lane.launch` does.
        timeout_seconds: the longest time of every wait.
        messages: those of buckets that are sent as factors, by index.
        rows_of: gives the numbers of rows in a step.
        rank: of this worker.
    """

    link = "gloo"

    def __init__(
        self,
        devices: Sequence[Device],
        buckets: Sequence[int],
        launch: Launch,
        timeout_seconds: float,
        messages: Mapping[int, FactorMessage],
        rows_of: RowsOf,
        rank: int,
    ) -> None:
        super().__init__(devices, timeout_seconds)
        self._buckets, self._launch = tuple(buckets), launch
        self._messages, self._rows_of, self._rank = messages, rows_of, rank
        self._launching = threading.Lock()
        self.begin_afresh()

    def begin_afresh(self) -> None:
        """Forgets what was launched, after a step that has failed."""
        self._missing = dict.fromkeys(self._buckets, len(self.devices))  # the devices that have not launched yet
        self._inboxes: dict[int, list[queue.SimpleQueue[Exception | None]]] = {
            bucket: [queue.SimpleQueue() for _ in self.devices] for bucket in self._buckets
        }
        self.release()

    def release(self) -> None:
        """See `Communicator`."""
        self._offered: dict[int, list[FactoredBucket | None]] = {
            bucket: [None] * len(self.devices) for bucket in self._messages
        }
        self._gatherings: dict[int, Gathering] = {}

    def launch_exchange(self, bucket: int, replica: int, whole: torch.Tensor) -> None:
        """See `Communicator`."""
        with self._launching:
            if self._is_last(bucket):
                self._send(bucket, (lambda group: group.all_reduce(whole)) if whole.numel() else None)

    def launch_gather(self, bucket: int, replica: int, own: FactoredBucket) -> None:
        """See `Communicator`."""
        with self._launching:
            offered = self._offered[bucket]
            offered[replica] = own
            if not self._is_last(bucket):
                return
            factors = [[list(gradient) for gradient in one.factors] for one in offered if one is not None]
            gathering = Gathering(self._messages[bucket], self._rows_of(bucket), self._rank, factors)
            first = offered[0]
            assert first is not None, "all have launched"
            # what was made of factors lies in the first replica's bucket; the factors themselves have been copied
            self._offered[bucket] = [FactoredBucket(first.tensor, (), one.pieces) for one in offered if one is not None]
            self._gatherings[bucket] = gathering
            into = gathering.gathered
            self._send(bucket, (lambda group: group.all_gather(gathering.own, into.unbind())) if into.numel() else None)

    def _is_last(self, bucket: int) -> bool:
        """Notes that a device has launched; returns whether all have."""
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return False
        self._missing[bucket] = len(self.devices)
        return True

    def _send(self, bucket: int, collective: Callable[[GlooGroup], object] | None) -> None:
        """Launches a collective, if there is anything to send, and tells all devices when it is done."""
        inboxes = self._inboxes[bucket]

        def done(error: Exception | None) -> None:
            for inbox in inboxes:
                inbox.put(error)

        if collective is not None:
            self._launch(collective, done)
        else:
            done(None)

    def wait_gather(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """As in the base class; raises as `wait_exchange`."""
        return self._make(bucket, replica)

    def wait_and_visit(self, bucket: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        """See `Communicator`; a part is visited as soon as it is made."""
        return self._make(bucket, replica, visit)

    def _make(self, bucket: int, replica: int, visit: Visit | None = None) -> torch.Tensor:
        self._await(bucket, replica)
        own = self._offered[bucket][replica]
        assert own is not None, "it was launched"
        everyone = [FactoredBucket(own.tensor, factors, ()) for factors in self._gatherings[bucket].replicas]
        if any(one.factors for one in everyone):
            make_pieces(own.pieces, everyone, visit)
        start, stop = share_bounds(own.tensor.numel(), len(self.devices), replica)
        return own.tensor[start:stop]

    def wait_exchange(self, bucket: int, replica: int, pending: torch.Tensor) -> torch.Tensor:
        """As in the base class.

        Raises:
            Aborted: another device, or another worker, has failed.
            LostConnectionError: the exchange has failed, or took too long.
        """
        self._await(bucket, replica)
        return pending

    def _await(self, bucket: int, replica: int) -> None:
        """Waits until the other workers' part of a bucket is there."""
        try:
            error = self._inboxes[bucket][replica].get(timeout=self.timeout_seconds + _SLACK_SECONDS)
        except queue.Empty:
            raise LostConnectionError(
                f"bucket {bucket} was not exchanged with the other workers within {self.timeout_seconds:g} s"
            ) from None
        if isinstance(error, Aborted):
            raise error
        if error is not None:
            raise LostConnectionError(
                f"bucket {bucket} could not be exchanged with the other workers: {in_words(error)}"
            ) from error

    def abort(self) -> None:
        """Wakes every device that waits."""
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                inbox.put(Aborted())


class ExchangesOfGpus(Exchanges):
    """As `Exchanges`, over NCCL, for workers with a GPU each. The host waits for each sum, so that a step fails and commits as on
    CPUs.

    Attributes:
        end_collectives: ends what runs between the workers. Else a GPU would wait for a worker that does not come, and whoever
            cleans up after the step for this GPU.
    """

    link = "nccl-workers"
    end_collectives: Callable[[], object]

    def abort(self) -> None:
        """See `Communicator`."""
        super().abort()
        self.end_collectives()


_KINDS: Mapping[str, type[Exchanges]] = {kind.link: kind for kind in (Exchanges, ExchangesOfGpus)}


def exchanges_of(program: Program, team: Team | None) -> dict[str, Communicator]:
    """What exchanges the buckets of a lowered program, by the name of the link; empty if it exchanges none, or is not to be run.

    Raises:
        ExecutionError: the link has no such runtime, or does not leave sums where they can be sent from.
    """
    graph = next(iter(program.device_graphs.values())).graph
    launches = list(calls_to(graph, *ops.EXCHANGES))
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
    buckets = [bucket_of(node) for node in launches]
    gathered = [bucket_of(node) for node in launches if node.target is ops.gather_factors]
    messages = {index: FactorMessage(program.buckets[index].sent_factors) for index in gathered}
    sizes = [len(program.buckets[index].slots) for index in gathered]

    def rows_of(bucket: int) -> Sequence[NumRows]:
        place = gathered.index(bucket)
        said = zip(team.row_counts, program.workers.devices_per_worker, strict=True)
        return [split_counts(counts, sizes, number)[place] for counts, number in said]

    launch, seconds, rank = team.launch_bucket, team.timeout_seconds, team.cluster.rank
    exchanges = kind(program.devices, buckets, launch, seconds, messages, rows_of, rank)
    if isinstance(exchanges, ExchangesOfGpus):
        exchanges.end_collectives = team.end_collectives
    return {kind.link: exchanges}
