"""The lanes of a team."""

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


def cut_when_broken(deaf: Lane, watched: Lane) -> None:
    """Aborts the lane ``deaf`` when ``watched``, a lane to the same workers, is lost. Closing ``watched`` ends the
    watch.

    An NCCL collective waits forever for an ended process, but gloo detects its closed connection.
    """
    threading.Thread(target=_watch, args=(deaf, watched), name="mirrorc watches connections", daemon=True).start()


def _watch(deaf: Lane, watched: Lane) -> None:
    while not watched.is_closed:
        if watched.is_broken:
            deaf.cut()
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


_SLACK_SECONDS = 1.0  # lanes have a timeout of their own, with a better message
_HOST = torch.device("cpu")


class Connections:
    """A lane for control messages and a lane for buckets. A call opens both; a failure closes both.

    The model's collectives have a third lane, because their order relative to buckets may differ between workers.

    Attributes:
        link: measured speed of the lane for buckets; None before the first opening.
    """

    def __init__(self, store: Any, cluster: Cluster, timeout_seconds: float, device: torch.device) -> None:
        self._store, self._cluster, self._timeout_seconds, self._device = store, cluster, timeout_seconds, device
        self._lanes: list[Lane] = []  # for control messages, for buckets, and for values; threads look at copies of it
        self.link: LinkSpeed | None = None

    @property
    def are_open(self) -> bool:
        return bool(self._lanes)

    @property
    def are_broken(self) -> bool:
        return any(lane.is_broken for lane in list(self._lanes))

    @property
    def buckets(self) -> Lane:
        return self._lanes[1]

    def open(
        self,
        call: int,
        is_over: Callable[[], bool],
        may_wait_on: Callable[[], bool] = lambda: False,
    ) -> None:
        """Opens closed lanes when all workers have reached a call.

        Raises:
            LostConnectionError: a worker has failed, has ended, or does not come in time.
        """
        if self._lanes:
            return
        store, seconds = self.part_of_store(f"call {call}"), self._timeout_seconds
        await_all(store, self._cluster, seconds, is_over, may_wait_on)
        for name, place in (("control", _HOST), ("buckets", self._device)):
            self._lanes.append(open_lane(name, store, self._cluster, seconds, place, is_over))
        if self.buckets.is_deaf:
            cut_when_broken(self.buckets, watched=self._lanes[0])
        self.link = measured_speed(self.buckets, self._cluster.num_workers, seconds, self._device)

    def open_values(self, call: int, is_over: Callable[[], bool]) -> None:
        if len(self._lanes) == 2:
            store = self.part_of_store(f"values of call {call}")
            await_all(store, self._cluster, self._timeout_seconds, is_over)
            self._lanes.append(open_lane("values", store, self._cluster, self._timeout_seconds, _HOST, is_over))

    def part_of_store(self, name: str) -> Any:
        """The store with a prefix, over a separate connection.

        Raises:
            LostConnectionError: the store does not answer.
        """

        try:
            return distributed.PrefixStore(name, OwnConnection(self._store, patience(self._timeout_seconds)).store)
        except (RuntimeError, TimeoutError) as error:
            raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error

    def run_control(self, collective: Callable[[Any], Any], may_wait_on: Callable[[], bool] = lambda: False) -> None:
        lanes = list(self._lanes)
        if not lanes:
            raise LostConnectionError("the connection to the other workers is closed")
        lanes[0].call(collective, self._timeout_seconds + _SLACK_SECONDS, may_wait_on)

    def launch_bucket(self, collective: Callable[[Any], Any], done: Done) -> None:
        self._launch(1, collective, done)

    def launch_value(self, collective: Callable[[Any], Any], done: Done) -> None:
        self._launch(2, collective, done)

    def _launch(self, place: int, collective: Callable[[Any], Any], done: Done) -> None:
        lanes = list(self._lanes)
        if len(lanes) > place:
            lanes[place].launch(collective, done)
        else:
            done(LostConnectionError("the connection to the other workers is closed"))

    @property
    def lanes(self) -> list[Lane]:
        """The lane for control messages comes first."""
        return list(self._lanes)

    def cut_buckets(self) -> None:
        for lane in list(self._lanes)[1:2]:
            lane.cut()

    def close(self) -> bool:
        """Closes all lanes. Returns False if a collective may still write to memory."""
        have_ended = [lane.close() for lane in self._lanes]
        self._lanes.clear()
        return all(have_ended)
