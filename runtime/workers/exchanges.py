"""Exchanges of buckets with the other workers: the devices of this one launch them together, and wait for the sums."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.links import SumPlace, link_named
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.runtime.communication import Aborted, Communicator
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

    Args:
        devices: of this worker.
        buckets: the indices of those that are exchanged.
        launch: launches a collective between the workers, as `mirrorc.runtime.workers.lane.Lane.launch` does.
        timeout_seconds: the longest time of every wait.
    """

    link = "gloo"

    def __init__(
        self, devices: Sequence[Device], buckets: Sequence[int], launch: Launch, timeout_seconds: float
    ) -> None:
        super().__init__(devices, timeout_seconds)
        self._buckets, self._launch = tuple(buckets), launch
        self._launching = threading.Lock()
        self.begin_afresh()

    def begin_afresh(self) -> None:
        """Forgets what was launched, after a step that has failed."""
        self._missing = dict.fromkeys(self._buckets, len(self.devices))  # the devices that have not launched yet
        self._inboxes: dict[int, list[queue.SimpleQueue[Exception | None]]] = {
            bucket: [queue.SimpleQueue() for _ in self.devices] for bucket in self._buckets
        }

    def launch_exchange(self, bucket: int, replica: int, whole: torch.Tensor) -> None:
        """See `Communicator`."""
        with self._launching:
            self._missing[bucket] -= 1
            if self._missing[bucket]:
                return
            self._missing[bucket] = len(self.devices)
            inboxes = self._inboxes[bucket]

            def done(error: Exception | None) -> None:
                for inbox in inboxes:
                    inbox.put(error)

            if whole.numel():
                self._launch(lambda group: group.all_reduce(whole), done)
            else:
                done(None)

    def wait_exchange(self, bucket: int, replica: int, pending: torch.Tensor) -> torch.Tensor:
        """As in the base class.

        Raises:
            Aborted: another device, or another worker, has failed.
            LostConnectionError: the exchange has failed, or took too long.
        """
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
        return pending

    def abort(self) -> None:
        """Wakes every device that waits."""
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                inbox.put(Aborted())


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
    if links != {Exchanges.link}:
        raise ExecutionError(
            f"steps over several workers run over {Exchanges.link!r}, not over {', '.join(sorted(links))}: use CPUs"
        )
    for node in calls_to(graph, *ops.REDUCTIONS):
        if link_named(node.kwargs["link"]).sum_place is not SumPlace.FIRST:
            raise ExecutionError(
                f"link {node.kwargs['link']!r} does not add up a worker's buckets in one place, from which they can be sent to "
                "the other workers: use link='shared-memory'"
            )
    buckets = [bucket_of(node) for node in launches]
    return {Exchanges.link: Exchanges(program.devices, buckets, team.launch_bucket, team.timeout_seconds)}
