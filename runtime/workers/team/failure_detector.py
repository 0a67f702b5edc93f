"""Watches the other workers: each tells in the store that it lives, and what has ended its step.

A broken connection names nobody, and a worker that is stopped breaks none.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.stores import OwnConnection, first_line
from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.call_progress import Progress

logger = logging.getLogger(__name__)

_FEWEST_SECONDS_BETWEEN_LOOKS = 0.2
_MOST_LOOKS_PER_SECOND = 500.0  # of all workers together, at one store
_SILENT_SECONDS = 2.0  # when a connection broke, who tells nothing for so long has ended, or hangs
_SECONDS_BETWEEN_SAMPLES = 1.0  # of what the others tell
_FRESH_SECONDS = 2.0  # an older sample says nothing: this worker itself may have been stopped
_LONGEST_ANSWER_SECONDS = 3.0  # of the store
_LONGEST_CONNECTING_SECONDS = 20.0
_SLACK_SECONDS = 1.0
_SECONDS_BETWEEN_TRIES = 0.02
_LONGEST_READING_SECONDS = 5.0  # for which a worker that has failed stays, so that the others can read why
_MOST_ERRORS = 5  # of the store, one after the other
_NUM_FAILURES = "failures"


@dataclass(frozen=True)
class Failure:
    """What has ended a step of all workers.

    Attributes:
        rank: whose failure it is; -1 if nobody knows.
        step: the number of the call that it ends; the first of them, if it is final.
        text: what has happened to it, as a clause: "it raised ValueError: ...".
        is_final: whether the worker cannot go on; otherwise all may call their steps again.
        had_voted: whether it had agreed to the step before, so that others may have made it.
        before_end: whether it came before this worker had all sums of a step that updates early, so that no worker can have ended
            that step: then all go on together, once what was updated in part is restored.
    """

    rank: int
    step: int
    text: str
    is_final: bool = False
    had_voted: bool = False
    before_end: bool = False

    def ends(self, call: int) -> bool:
        """Whether it ends a call, given by its number."""
        return self.step == call or (self.is_final and self.step < call)


class Watcher:
    """A thread that tells the other workers that this one lives, and looks what they have published.

    Args:
        store: where the workers meet; nothing else uses its keys.
        workers: all, by rank.
        rank: of this worker.
        on_failure: a method, called in the thread with each failure that another worker has published, in their order, as long
            as its object is there. It may be a failure of this worker, on which the others have given up.

    Raises:
        CommunicationError: the store does not answer.

    Attributes:
        own: how far this worker is, which is told with each beat.
    """

    def __init__(self, store: Any, workers: Sequence[Worker], rank: int, on_failure: Callable[[Failure], None]) -> None:
        self.own = Progress()
        self._connection = _connected(store, workers[rank])
        self._store, self._workers, self._rank = self._connection.store, workers, rank
        self._on_failure = weakref.WeakMethod(on_failure)
        self._interval = max(_FEWEST_SECONDS_BETWEEN_LOOKS, len(workers) / _MOST_LOOKS_PER_SECOND)
        self._silent_seconds = max(_SILENT_SECONDS, 3 * self._interval)  # so that some signs of life are missed
        self._num_seen = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # the beat of each other worker, and when it was heard first
        self._heard_at = float("-inf")
        self._is_lost = False  # the store: it has not answered when that was asked last
        self._asked_at: float | None = None  # when the thread began to ask what the store has not answered yet
        self._own: set[str] = set()  # the keys of what this worker has published
        self._gone: set[int] = set()  # the ranks of those that cannot go on, who may read nothing more
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mirrorc watcher", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        number = num_errors = 0
        while num_errors < _MOST_ERRORS and not self._ending.wait(self._interval * (1 + num_errors)):
            if self._connection.is_lost:  # the host of the store has ended, because all is done, perhaps
                return
            number += 1
            self._asked_at = time.monotonic()
            try:
                self._store.set(_beat(self._rank), f"{number} {self.own.to_text()}")
                self.look()
                if time.monotonic() - self._heard_at > _SECONDS_BETWEEN_SAMPLES:
                    self._listen(self._fresh())
                num_errors = 0
            except RuntimeError as error:
                num_errors += 1
                logger.debug("the workers' store does not answer: %s", first_line(error))
            finally:
                self._asked_at = None

    def look(self) -> None:
        """Reads what was published since the last look."""
        count = self._store.add(_NUM_FAILURES, 0)
        while self._num_seen < count:
            key = _failure(self._num_seen)
            if not self._store.check([key]):
                return  # it is being written
            found = Failure(**json.loads(self._store.get(key)))
            self._num_seen += 1
            on_failure = self._on_failure()
            if key not in self._own and on_failure is not None:
                on_failure(found)
                self._store.set(_read(key, self._rank), "")
            if found.is_final:
                self._gone.add(found.rank)
            del on_failure

    def publish(self, failure: Failure, silent: Collection[int] = ()) -> None:
        """Tells all others of a failure, and stays until they have read it, for a bounded time. Raises nothing.

        Those of the ranks ``silent`` are not waited for, nor are those that cannot go on and have told so.
        """
        readers = set(range(len(self._workers))) - {self._rank, *silent}
        seconds = _LONGEST_ANSWER_SECONDS + _LONGEST_READING_SECONDS
        try:
            in_bounded_time(lambda: self._publish(failure, readers), seconds)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the workers' store is lost: %s", first_line(error))

    def _publish(self, failure: Failure, readers: Collection[int]) -> None:
        key = _failure(self._store.add(_NUM_FAILURES, 1) - 1)
        self._own.add(key)  # it is read when it is there
        self._store.set(key, json.dumps(asdict(failure)))
        until = time.monotonic() + _LONGEST_READING_SECONDS
        while time.monotonic() < until:
            awaited = [_read(key, rank) for rank in readers if rank not in self._gone]
            if not awaited or self._store.check(awaited):
                return
            time.sleep(self._interval / 4)

    def find_silent(self, is_known: Callable[[], bool]) -> list[int] | None:
        """The ranks of the workers that tell nothing any more; None if the store does not answer.

        Takes some seconds, or one where the thread has waited for the store as long; ends early, without a finding, when
        ``is_known`` says that a failure is known meanwhile.
        """
        seconds = self._silent_seconds + _SLACK_SECONDS
        try:
            self._await_answer(seconds, is_known)
            return in_bounded_time(lambda: self._find_silent(is_known), seconds)
        except (RuntimeError, TimeoutError):
            self._is_lost = True
            return None

    def _await_answer(self, seconds: float, is_known: Callable[[], bool]) -> None:
        """Returns at once if the thread waits for no answer of the store, or not for so long yet, or if ``is_known`` says so.
        Otherwise the store hangs, or this worker was stopped, and hears the answer now.

        Raises:
            TimeoutError: there is none.
        """
        asked_at, until = self._asked_at, time.monotonic() + _SLACK_SECONDS
        if asked_at is None or time.monotonic() - asked_at < seconds:
            return
        while self._asked_at == asked_at and not is_known():
            if time.monotonic() > until:
                raise TimeoutError("the workers' store does not answer")
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def all_live(self, is_known: Callable[[], bool]) -> bool:
        """Whether all other workers show that they live, though they may not call their steps; takes some seconds at most.

        Also ends, with True, when ``is_known`` says that a failure is known meanwhile.
        """
        return self.find_silent(is_known) == []

    def beats(self) -> dict[int, bytes]:
        """What the other workers have told last to show that they live, by rank."""
        keys = {rank: _beat(rank) for rank in range(len(self._workers)) if rank != self._rank}
        return {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}

    def progress(self) -> dict[int, Progress]:
        """How far each worker was when it told so last, by rank; without those that have told nothing. Takes a bounded time."""
        try:
            beats = in_bounded_time(self.beats, _LONGEST_ANSWER_SECONDS)
        except (RuntimeError, TimeoutError):
            beats = {}
        told = {rank: Progress.from_text(beat.decode().partition(" ")[2]) for rank, beat in beats.items() if beat}
        return {**told, self._rank: self.own}

    def _listen(self, before: dict[int, tuple[bytes, float]]) -> list[int]:
        """Hears what the others tell now; gives the ranks of those that have told nothing new since ``before``."""
        beats, now = self.beats(), time.monotonic()
        same = [rank for rank, beat in beats.items() if rank in before and before[rank][0] == beat]
        self._heard = {rank: before[rank] if rank in same else (beat, now) for rank, beat in beats.items()}
        self._heard_at = now
        return same

    def _fresh(self) -> dict[int, tuple[bytes, float]]:
        """What was heard, unless that is long ago."""
        return self._heard if time.monotonic() - self._heard_at < _FRESH_SECONDS else {}

    def _find_silent(self, is_known: Callable[[], bool]) -> list[int]:
        self._listen(self._fresh())  # what has changed since an earlier look may have come before the worker ended
        before = self._heard
        while True:
            silent, now = self._listen(before), time.monotonic()
            if is_known():
                return []
            if all(now - before[rank][1] > self._silent_seconds for rank in silent):
                return silent
            before = {rank: before[rank] for rank in silent}
            time.sleep(self._interval / 2)

    def close(self) -> None:
        """Ends the thread."""
        self._ending.set()

    def leave(self, failure: Failure) -> None:
        """Ends the thread, and tells the others what they find when they wait for this worker. Raises nothing."""
        self.close()
        if self._is_lost or self._connection.is_lost:
            return
        try:
            in_bounded_time(lambda: self._publish(failure, ()), _LONGEST_ANSWER_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the workers' store is lost: %s", first_line(error))


def _connected(store: Any, own: Worker) -> OwnConnection:
    try:
        return OwnConnection(store, _LONGEST_CONNECTING_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        raise CommunicationError(
            f"{own}: the workers' store does not answer ({first_line(error)}). See what the process that has opened it does: "
            "worker 0, or torchrun's agent"
        ) from error


def _beat(rank: int) -> str:
    return f"beat {rank}"


def _failure(index: int) -> str:
    return f"failure {index}"


def _read(key: str, rank: int) -> str:
    return f"{key} was read by {rank}"
