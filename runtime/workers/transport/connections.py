"""The connections of a team: what workers tell each other goes over one of them, buckets over another, values over a third."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.cluster import Cluster
from mirrorc.cluster.stores import OwnConnection
from mirrorc.runtime.workers.transport.connect import await_all, measured_speed, open_lane, patience
from mirrorc.runtime.workers.transport.lane import Done, Lane, LostConnectionError, in_words

_SECONDS_BETWEEN_LOOKS = 0.5


def cut_when_broken(deaf: Lane, told: Lane) -> None:
    """Cuts a lane when another one to the same workers breaks; returns at once.

    A collective of NCCL waits for ever for a worker whose process has ended; a connection of gloo is closed then.

    Args:
        deaf: the lane that is cut.
        told: the lane over gloo. When it is closed, nobody looks any more.
    """
    threading.Thread(target=_watch, args=(deaf, told), name="mirrorc watches connections", daemon=True).start()


def _watch(deaf: Lane, told: Lane) -> None:
    while not told.is_closed:
        if told.is_broken:
            deaf.cut()
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


_SLACK_SECONDS = 1.0  # what the lanes wait for ends by itself; its text says more
_HOST = torch.device("cpu")


class Connections:
    """A lane for words and one for buckets, which are opened together, at a call, and closed together, by a failure.

    Where the model asks all replicas for values, there is a third lane. A device without examples launches its buckets when it
    likes, and so it may be before such a value on one worker and after it on another: over one lane, they would be mixed up.

    Args:
        store: where the workers of the team meet; nothing else uses its keys.
        cluster: the workers, who have joined.
        timeout_seconds: the longest time that a worker waits for another one.
        device: where this worker's buckets lie; of the same type on all workers.

    Attributes:
        link: how fast the link between the workers is, as measured when it was opened last; None before.
    """

    def __init__(self, store: Any, cluster: Cluster, timeout_seconds: float, device: torch.device) -> None:
        self._store, self._cluster, self._timeout_seconds, self._device = store, cluster, timeout_seconds, device
        self._lanes: list[Lane] = []  # for words, for buckets, and for values; threads look at copies of it
        self.link: LinkSpeed | None = None

    @property
    def are_open(self) -> bool:
        """Whether there are any."""
        return bool(self._lanes)

    @property
    def are_broken(self) -> bool:
        """Whether another worker has closed its end of one."""
        return any(lane.is_broken for lane in list(self._lanes))

    @property
    def buckets(self) -> Lane:
        """The lane for buckets; there are connections."""
        return self._lanes[1]

    def open(
        self,
        call: int,
        is_over: Callable[[], bool],
        may_wait_on: Callable[[], bool] = lambda: False,
    ) -> None:
        """Opens them, if there are none, when all workers have come to a call.

        Args:
            call: its number.
            is_over: whether a worker has failed meanwhile.
            may_wait_on: asked whenever the time to wait for workers is over, whether to wait as long again.

        Raises:
            LostConnectionError: a worker has failed, has ended, or does not come in time.
        """
        if self._lanes:
            return
        store, seconds = self.part_of_store(f"call {call}"), self._timeout_seconds
        await_all(store, self._cluster, seconds, is_over, may_wait_on)
        for name, place in (("words", _HOST), ("buckets", self._device)):
            self._lanes.append(open_lane(name, store, self._cluster, seconds, place, is_over))
        if self.buckets.is_deaf:
            cut_when_broken(self.buckets, told=self._lanes[0])
        self.link = measured_speed(self.buckets, self._cluster.num_workers, seconds, self._device)

    def open_values(self, call: int, is_over: Callable[[], bool]) -> None:
        """Opens the lane for values, if there is none, when all workers have met in a call; takes and raises what `open` does."""
        if len(self._lanes) == 2:
            store = self.part_of_store(f"values of call {call}")
            await_all(store, self._cluster, self._timeout_seconds, is_over)
            self._lanes.append(open_lane("values", store, self._cluster, self._timeout_seconds, _HOST, is_over))

    def part_of_store(self, name: str) -> Any:
        """A part of the store, over a connection of its own.

        Raises:
            LostConnectionError: the store does not answer.
        """

        try:
            return distributed.PrefixStore(name, OwnConnection(self._store, patience(self._timeout_seconds)).store)
        except (RuntimeError, TimeoutError) as error:
            raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error

    def tell(self, collective: Callable[[Any], Any], may_wait_on: Callable[[], bool] = lambda: False) -> None:
        """Runs a collective on what workers tell each other; see `Lane.call`.

        Raises:
            LostConnectionError: a worker has failed, or tells nothing in time.
        """
        lanes = list(self._lanes)
        if not lanes:
            raise LostConnectionError("the connection to the other workers is closed")
        lanes[0].call(collective, self._timeout_seconds + _SLACK_SECONDS, may_wait_on)

    def launch_bucket(self, collective: Callable[[Any], Any], done: Done) -> None:
        """Launches a collective on a bucket; see `Lane.launch`."""
        self._launch(1, collective, done)

    def launch_value(self, collective: Callable[[Any], Any], done: Done) -> None:
        """Launches a collective on a value of the model; see `Lane.launch`."""
        self._launch(2, collective, done)

    def _launch(self, place: int, collective: Callable[[Any], Any], done: Done) -> None:
        lanes = list(self._lanes)
        if len(lanes) > place:
            lanes[place].launch(collective, done)
        else:
            done(LostConnectionError("the connection to the other workers is closed"))

    @property
    def lanes(self) -> list[Lane]:
        """Those that are open now, that for words first; a copy."""
        return list(self._lanes)

    def cut_buckets(self) -> None:
        """Ends the collectives on buckets with an error, here and on the other workers."""
        for lane in list(self._lanes)[1:2]:
            lane.cut()

    def close(self) -> bool:
        """Closes them, if there are any; returns whether all collectives have ended, so that none of them writes any more."""
        have_ended = [lane.close() for lane in self._lanes]
        self._lanes.clear()
        return all(have_ended)
