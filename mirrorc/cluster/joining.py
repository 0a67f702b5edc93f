"""Joins this process to the other workers."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed

from mirrorc.cluster.bounded_calls import in_bounded_time, seconds_of
from mirrorc.cluster.lost_in_rounds import Lookout, Presence, pace_of_rounds
from mirrorc.cluster.membership import Worker, call_roll
from mirrorc.cluster.place import Place, place_by_tf_config, place_by_torchrun
from mirrorc.cluster.rounds import Round
from mirrorc.cluster.stores import SEE_STORE, open_store
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem

_BY_GROUP = "the process group"
_LIFE = "life"  # the part of the store for heartbeats
_LONGEST_VERDICT_SECONDS = 10.0  # on top of the wait for others, to send the verdict

_joining = threading.Lock()
_joined: dict[Any, Cluster] = {}  # by process, group and place
_num_tries: dict[Any, int] = {}  # the same number on all workers, as they join together or not at all


@dataclass(frozen=True, eq=False)
class Cluster:
    """The joined workers. A process on its own is a cluster of one worker.

    Attributes:
        local_rank: this worker's number on its machine; also its GPU, if each worker has one.
        workers: by rank.
        store: the rendezvous store, which ends with worker 0 or torchrun's agent; None for a process on its own.
    """

    rank: int = 0
    num_workers: int = 1
    local_rank: int = 0
    workers: tuple[Worker, ...] = ()
    store: Any = None
    _num_comparisons: Iterator[int] = field(default_factory=itertools.count)
    _num_rounds: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, whose values are broadcast at the start."""
        return self.rank == 0

    @property
    def should_checkpoint(self) -> bool:
        """True for the chief."""
        return self.is_chief

    def check_same(self, what: str, facts: Mapping[str, object], *, timeout_seconds: float = 1800.0) -> None:
        """Compares facts between all workers, such as a script's options. If they differ, all raise the same error.

        All workers call it equally often and in the same order.

        Args:
            what: the subject of the facts, in the plural, such as ``"the files"``.
            facts: any values, by name; their texts and their order are compared.

        Raises:
            CommunicationError: names the first worker that differs from the chief, and the fact; or the missing
                workers.
        """
        if self.num_workers > 1:
            self._comparison(what).check_same(what, facts, timeout_seconds=timeout_seconds)

    def all_say(self, text: str, *, timeout_seconds: float = 1800.0) -> list[str]:
        """Exchanges texts. Returns all workers' texts by rank. All workers call it equally often and in the same order.

        Raises:
            CommunicationError: names the workers that sent no text in time.
        """
        if self.num_workers == 1:
            return [text]
        return self._comparison("what they say").all_say(text, timeout_seconds=timeout_seconds)

    def _comparison(self, topic: str) -> Round:
        return self._round(f"same/{next(self._num_comparisons)}", f"a comparison of {topic}")

    def begin(self, doing: str) -> Round:
        """Begins a common task, such as "mirrorc.compile". All workers call it in the same order."""
        return self._round(f"round/{next(self._num_rounds)}", doing)

    def _round(self, name: str, doing: str) -> Round:
        return Round(self.store, self.workers, self.rank, name, doing, self.lookout())

    def lookout(self) -> Lookout:
        store = distributed.PrefixStore(_LIFE, self.store)
        return Lookout(store, self.workers, self.rank, pace_of_rounds(self.num_workers))

    def __repr__(self) -> str:
        return f"<Cluster: worker {self.rank} of {self.num_workers}>"


def find_place(process_group: Any = None, variables: Mapping[str, str] | None = None) -> Place:
    """The place of this process in the first of these descriptions: a process group, torchrun's variables,
    ``TF_CONFIG``.

    Contacts no other process. Without a description, this is a process on its own.

    Args:
        process_group: a group of `torch.distributed` with all workers; None for the default group, if it is
            initialised.
        variables: environment variables; None for those of this process.

    Raises:
        TypeError, ValueError: ``process_group`` is not a group, or lacks this process; or a variable is wrong, and the
            message names it.
    """
    if process_group is not None or (distributed.is_available() and distributed.is_initialized()):
        return _place_in(process_group)
    variables = os.environ if variables is None else variables
    return place_by_torchrun(variables) or place_by_tf_config(variables) or Place()


def join(process_group: Any = None, *, timeout: float | timedelta = 1800.0) -> Cluster:
    """Joins the workers described by `find_place`. Returns when all have joined.

    Call it in every worker. A second call returns the same cluster. `torch.distributed` stays as it is.

    Args:
        timeout: the longest wait for other workers, in seconds or as a `datetime.timedelta`.

    Raises:
        TypeError, ValueError: as `find_place`; or the time is not positive.
        CommunicationError: a worker does not come in time, a port is in use, two workers have the same rank, or their
            numbers of workers or versions differ. All present workers raise it.
    """
    if not seconds_of(timeout) > 0:
        raise ValueError(f"MC1002: timeout is {timeout!r}: give a positive number of seconds, or a datetime.timedelta")
    place = find_place(process_group)
    if place.num_workers == 1:
        return Cluster(local_rank=place.local_rank or 0)
    key = (os.getpid(), process_group, place)
    with _joining:
        if key not in _joined:
            _joined[key] = _join(process_group, place, seconds_of(timeout), key)
        return _joined[key]


def _join(process_group: Any, place: Place, timeout_seconds: float, key: Any) -> Cluster:
    deadline = time.monotonic() + min(timeout_seconds, threading.TIMEOUT_MAX)
    group: Any = process_group if process_group is not None else distributed.group.WORLD
    opened = open_store(place, deadline) if place.host else group.get_group_store()
    number = _num_tries[key] = _num_tries.get(key, 0) + 1
    store, workers = _roll_call(opened, place, deadline, number)
    machine = workers[place.rank].machine
    local_rank = place.local_rank
    if local_rank is None:
        local_rank = sum(worker.machine == machine for worker in workers[: place.rank])
    return Cluster(place.rank, place.num_workers, local_rank, tuple(workers), store)


def _roll_call(opened: Any, place: Place, deadline: float, number: int) -> tuple[Any, list[Worker]]:
    """``number`` counts attempts to join, and is equal on all workers with a common store."""
    seconds = max(0.0, deadline - time.monotonic()) + _LONGEST_VERDICT_SECONDS
    try:
        return in_bounded_time(lambda: _roll_call_in_start(opened, place, deadline, number), seconds)
    except (RuntimeError, TimeoutError) as error:  # of torch; CommunicationError is none of them
        where = f" at {place.address}" if place.host else ""
        raise problem(
            CommunicationError,
            f"MC6204: {place}: the store through which workers meet{where} has stopped answering",
            str(error),
            SEE_STORE,
        ) from None


def _roll_call_in_start(opened: Any, place: Place, deadline: float, number: int) -> tuple[Any, list[Worker]]:
    answer: Callable[[], object] = lambda: None  # noqa: E731
    if place.store_persists:
        starts = distributed.PrefixStore("mirrorc", opened)
        if place.rank == 0:
            start = _Start(starts)
            number, answer = start.number, start.answer
        else:
            number = _await_start(starts, place, deadline)
    store = distributed.PrefixStore(f"mirrorc/{number}", opened)
    workers = call_roll(store, place, deadline, while_waiting=answer)
    Presence(distributed.PrefixStore(_LIFE, store), place.num_workers, place.rank, pace_of_rounds(place.num_workers))
    return store, workers


def _place_in(process_group: Any) -> Place:
    if process_group is not None and not (
        distributed.is_available() and isinstance(process_group, distributed.ProcessGroup)
    ):
        fix = ("leave process_group= out, for the default group", "torch.distributed.new_group(ranks), with this one")
        raise problem(TypeError, f"MC6106: process_group is {process_group!r}", fix=fix)
    rank, num_workers = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    if rank < 0:
        raise problem(
            ValueError,
            "MC6106: process_group does not have this process in it",
            fix="torch.distributed.new_group(ranks), with the ranks of all workers that train together",
        )
    return Place(rank, num_workers, _BY_GROUP, store_persists=True)


_SECONDS_BETWEEN_LOOKS = 0.02
_NUM_STARTS, _NUM_KNOCKS = "starts", "knocks"


class _Start:
    """A numbered start of the workers. The chief opens it.

    torchrun's agents restart failed workers but keep the store, and each agent counts only its own restarts. Other
    workers therefore send a request, and join the start whose chief answers.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._num_heard = store, -1
        self.number: int = store.add(_NUM_STARTS, 1)

    def answer(self) -> None:
        """Answers new requests. The chief calls this repeatedly while it waits."""
        knocks = self._store.add(_NUM_KNOCKS, 0)
        if knocks != self._num_heard:
            self._store.set(_heard(self.number), str(knocks))
            self._num_heard = knocks


def _await_start(store: Any, place: Place, deadline: float) -> int:
    number_of_knock = store.add(_NUM_KNOCKS, 1)
    while True:
        number = store.add(_NUM_STARTS, 0)
        if number and store.check([_heard(number)]) and int(store.get(_heard(number))) >= number_of_knock:
            return number
        if time.monotonic() > deadline:
            fix = "start worker 0, with the same MASTER_ADDR and MASTER_PORT"
            raise problem(CommunicationError, f"MC6205: {place}: worker 0 did not come in time", fix=fix)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _heard(number: int) -> str:
    return f"heard/{number}"
