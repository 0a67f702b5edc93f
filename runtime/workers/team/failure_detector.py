"""Failure detector: each worker publishes heartbeats and failures in the store.

A broken connection does not name the failed worker, and a stopped worker breaks none.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.stores import OwnConnection, first_line
from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.call_progress import Progress
from mirrorc.runtime.workers.protocol.call_state import Failure

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


class Watcher:
    """A thread that sends heartbeats, and polls for published failures.

    Args:
        store: the workers' store; these keys are used for nothing else.
        workers: all, by rank.
        rank: rank of this worker.
        on_failure: a method, weakly held, called in the thread with each failure that another worker has published, in
            order. It may name this worker, when the others have given up on it.

    Raises:
        CommunicationError: the store does not answer.

    Attributes:
        local_progress: this worker's progress, sent with each heartbeat.
    """

    def __init__(self, store: Any, workers: Sequence[Worker], rank: int, on_failure: Callable[[Failure], None]) -> None:
        self.local_progress = Progress()
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
        self._published_keys: set[str] = set()  # the keys of what this worker has published
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
                self._store.set(_beat(self._rank), f"{number} {self.local_progress.to_text()}")
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
        """Reads the failures published since the last poll."""
        count = self._store.add(_NUM_FAILURES, 0)
        while self._num_seen < count:
            key = _failure(self._num_seen)
            if not self._store.check([key]):
                return  # it is being written
            failure = Failure.from_text(self._store.get(key))
            self._num_seen += 1
            on_failure = self._on_failure()
            if key not in self._published_keys and on_failure is not None:
                on_failure(failure)
                self._store.set(_read(key, self._rank), "")
            if failure.is_final:
                self._gone.add(failure.rank)
            del on_failure

    def publish(self, failure: Failure, silent: Collection[int] = ()) -> None:
        """Publishes a failure, and waits for all others to read it, for a bounded time. Raises nothing.

        Does not wait for the ranks ``silent``, nor for workers with final failures.
        """
        readers = set(range(len(self._workers))) - {self._rank, *silent}
        seconds = _LONGEST_ANSWER_SECONDS + _LONGEST_READING_SECONDS
        try:
            in_bounded_time(lambda: self._publish(failure, readers), seconds)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the workers' store is lost: %s", first_line(error))

    def _publish(self, failure: Failure, readers: Collection[int]) -> None:
        key = _failure(self._store.add(_NUM_FAILURES, 1) - 1)
        self._published_keys.add(key)  # it is read when it is there
        self._store.set(key, failure.to_text())
        until = time.monotonic() + _LONGEST_READING_SECONDS
        while time.monotonic() < until:
            awaited = [_read(key, rank) for rank in readers if rank not in self._gone]
            if not awaited or self._store.check(awaited):
                return
            time.sleep(self._interval / 4)

    def find_silent(self, is_known: Callable[[], bool]) -> list[int] | None:
        """The ranks without heartbeats; None if the store does not answer.

        Takes some seconds, or one if the thread has already waited as long for the store. Ends early, without a result,
        when ``is_known`` says that a failure is known.
        """
        seconds = self._silent_seconds + _SLACK_SECONDS
        try:
            self._await_answer(seconds, is_known)
            return in_bounded_time(lambda: self._find_silent(is_known), seconds)
        except (RuntimeError, TimeoutError):
            self._is_lost = True
            return None

    def _await_answer(self, seconds: float, is_known: Callable[[], bool]) -> None:
        """Waits if the thread has waited long for an answer of the store. Then the store hangs, or this worker was stopped,
        and gets the answer now.

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
        """Waits some seconds at most for heartbeats of all other workers, in a step or not.

        Returns True early for a failure known to ``is_known``.
        """
        return self.find_silent(is_known) == []

    def beats(self) -> dict[int, bytes]:
        """The last heartbeats of the other workers, by rank."""
        keys = {rank: _beat(rank) for rank in range(len(self._workers)) if rank != self._rank}
        return {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}

    def progress(self) -> dict[int, Progress]:
        """The last known progress of each worker, by rank, without those that have sent none. Takes a bounded time."""
        try:
            beats = in_bounded_time(self.beats, _LONGEST_ANSWER_SECONDS)
        except (RuntimeError, TimeoutError):
            beats = {}
        by_rank = {rank: Progress.from_text(beat.decode().partition(" ")[2]) for rank, beat in beats.items() if beat}
        return {**by_rank, self._rank: self.local_progress}

    def _listen(self, before: dict[int, tuple[bytes, float]]) -> list[int]:
        """Polls the heartbeats; returns the ranks without a new one since ``before``."""
        beats, now = self.beats(), time.monotonic()
        same = [rank for rank, beat in beats.items() if rank in before and before[rank][0] == beat]
        self._heard = {rank: before[rank] if rank in same else (beat, now) for rank, beat in beats.items()}
        self._heard_at = now
        return same

    def _fresh(self) -> dict[int, tuple[bytes, float]]:
        """The last heartbeats, unless outdated."""
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
        """Ends the thread, and publishes the reason for workers that wait for this one. Raises nothing."""
        self.close()
        if self._is_lost or self._connection.is_lost:
            return
        try:
            in_bounded_time(lambda: self._publish(failure, ()), _LONGEST_ANSWER_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the workers' store is lost: %s", first_line(error))


def _connected(store: Any, worker: Worker) -> OwnConnection:
    try:
        return OwnConnection(store, _LONGEST_CONNECTING_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        raise CommunicationError(
            f"{worker}: the workers' store does not answer ({first_line(error)}). See what the process that has opened it does: "
            "worker 0, or torchrun's agent"
        ) from error


def _beat(rank: int) -> str:
    return f"beat {rank}"


def _failure(index: int) -> str:
    return f"failure {index}"


def _read(key: str, rank: int) -> str:
    return f"{key} was read by {rank}"
