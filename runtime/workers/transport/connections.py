"""The rendezvous of workers, and the lanes of a team."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from mirrorc.analysis.cost.link_speed import LinkSpeed, fitted_speed
from mirrorc.cluster import Cluster
from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.stores import OwnConnection
from mirrorc.runtime.workers.transport.lane import Done, Lane, LostConnectionError, in_words

_LONGEST_OPENING_SECONDS = 30.0  # of a lane, once all workers have come
_SECONDS_BETWEEN_LOOKS = 0.02
_MEASURED_BYTES = (2**6, 2**20, 2**22)  # sizes of the sums that measure the speed of a link
_NUM_MEASUREMENTS = 4
_SHORTEST_PATIENCE_SECONDS, _LONGEST_PATIENCE_SECONDS = 5.0, 30.0  # with the store, whose host may be busy
_SECONDS_BETWEEN_WATCHES = 0.5
BUCKETS, VALUES = 1, 2  # places of lanes in a team's list; the one for control messages comes first
_SLACK_SECONDS = 1.0  # lanes have a timeout of their own, with a better message
_HOST = torch.device("cpu")
_T = TypeVar("_T")


def await_all(
    store: Any,
    cluster: Cluster,
    timeout_seconds: float,
    is_over: Callable[[], bool],
    may_wait_on: Callable[[], bool] = lambda: False,
) -> None:
    """Waits until all workers have reached a call. Unlike gloo's rendezvous, signals can interrupt this wait."""
    answer = functools.partial(answered, seconds=patience(timeout_seconds))
    everyone = [f"come {rank}" for rank in range(cluster.num_workers)]
    late = LostConnectionError("not all workers came to this call")
    answer(lambda: store.set(everyone[cluster.rank], ""))
    until = time.monotonic() + timeout_seconds
    lookout = cluster.lookout()
    while True:
        have_come, gone = answer(lambda: (all(store.check([key]) for key in everyone), lookout.gone()))
        if have_come:
            return
        if gone or is_over():
            raise late
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        if time.monotonic() > until:
            if not may_wait_on():
                raise late
            until = time.monotonic() + timeout_seconds


def all_texts(
    store: Any, cluster: Cluster, text: str, timeout_seconds: float, is_over: Callable[[], bool]
) -> list[str]:
    """Exchanges a text with all workers; returns the texts by rank. A repeated call must send the same text."""
    answer = functools.partial(answered, seconds=patience(timeout_seconds))
    keys = [f"text {rank}" for rank in range(cluster.num_workers)]
    answer(lambda: store.set(keys[cluster.rank], text))
    until = time.monotonic() + timeout_seconds
    while True:
        is_last_look = is_over() or time.monotonic() > until  # a lost worker may have sent its text before
        if answer(lambda: all(store.check([key]) for key in keys)):
            return answer(lambda: [store.get(key).decode() for key in keys])
        if is_last_look:
            raise LostConnectionError("not all workers told what they have")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def patience(timeout_seconds: float) -> float:
    return max(_SHORTEST_PATIENCE_SECONDS, min(timeout_seconds / 2, _LONGEST_PATIENCE_SECONDS))


def answered(ask: Callable[[], _T], seconds: float) -> _T:
    """Bounds the time, because a store on a stopped host stays connected."""
    try:
        return in_bounded_time(ask, seconds)
    except (RuntimeError, TimeoutError) as error:
        raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error


def measured_speed(lane: Lane, num_workers: int, timeout_seconds: float, device: torch.device) -> LinkSpeed:
    """Collective over all workers."""
    seconds: dict[int, list[float]] = {num_bytes: [] for num_bytes in _MEASURED_BYTES}
    measured = torch.zeros(max(_MEASURED_BYTES), dtype=torch.uint8, device=device)
    for _ in range(_NUM_MEASUREMENTS):  # the first opens connections
        for num_bytes, times in seconds.items():
            part, began = measured[:num_bytes], time.perf_counter()
            lane.call(lambda group: group.all_reduce(part), timeout_seconds)  # noqa: B023 - it is called at once
            times.append(time.perf_counter() - began)
    empty, small, large = _MEASURED_BYTES
    least = {num_bytes: min(times) for num_bytes, times in seconds.items()}
    return fitted_speed((small, least[small]), (large, least[large]), least[empty], num_workers)


def open_lane(
    name: str, store: Any, cluster: Cluster, timeout_seconds: float, device: torch.device, is_over: Callable[[], bool]
) -> Lane:
    """Collective over all workers, after the rendezvous."""
    lane_store = distributed.PrefixStore(name, store)
    places = cluster.rank, cluster.num_workers
    opened = functools.partial(Lane, lane_store, *places, timeout_seconds, f"mirrorc {name}", device)
    try:
        return in_bounded_time(opened, min(_LONGEST_OPENING_SECONDS, timeout_seconds), is_over)  # one may end meanwhile
    except (RuntimeError, TimeoutError) as error:
        variable = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
        raise LostConnectionError(
            f"workers could not connect: {in_words(error)}; if they run on several machines, let {variable} name the "
            "interfaces by which they reach each other"
        ) from error


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
        time.sleep(_SECONDS_BETWEEN_WATCHES)


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

    def open(self, call: int, is_over: Callable[[], bool], may_wait_on: Callable[[], bool] = lambda: False) -> None:
        """Opens closed lanes when all workers have reached a call."""
        if self._lanes:
            return
        store, seconds = self.part_of_store(f"call {call}"), self._timeout_seconds
        await_all(store, self._cluster, seconds, is_over, may_wait_on)
        for name, place in (("control", _HOST), ("buckets", self._device)):
            self._lanes.append(open_lane(name, store, self._cluster, seconds, place, is_over))
        control, buckets = self._lanes
        if buckets.is_deaf:
            cut_when_broken(buckets, watched=control)
        self.link = measured_speed(buckets, self._cluster.num_workers, seconds, self._device)

    def open_values(self, call: int, is_over: Callable[[], bool]) -> None:
        if len(self._lanes) == 2:
            store = self.part_of_store(f"values of call {call}")
            await_all(store, self._cluster, self._timeout_seconds, is_over)
            self._lanes.append(open_lane("values", store, self._cluster, self._timeout_seconds, _HOST, is_over))

    def part_of_store(self, name: str) -> Any:
        """The store with a prefix, over a separate connection."""

        try:
            return distributed.PrefixStore(name, OwnConnection(self._store, patience(self._timeout_seconds)).store)
        except (RuntimeError, TimeoutError) as error:
            raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error

    def run_control(self, collective: Callable[[Any], Any], may_wait_on: Callable[[], bool] = lambda: False) -> None:
        lanes = list(self._lanes)
        if not lanes:
            raise LostConnectionError("the connection to the other workers is closed")
        lanes[0].call(collective, self._timeout_seconds + _SLACK_SECONDS, may_wait_on)

    def launch(self, place: int, collective: Callable[[Any], Any], done: Done) -> None:
        """``place``: `BUCKETS` or `VALUES`."""
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
