"""The failure detector: each worker sends heartbeats to a store, and a message when it fails or ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.stores import OwnConnection, first_line

logger = logging.getLogger(__name__)

_LONGEST_CONNECTING_SECONDS = 20.0
_LONGEST_ANSWER_SECONDS = 3.0  # of the store
_SHORTEST_ANSWER_SECONDS = 0.3  # if a heartbeat has waited long already: this process may have been stopped
_LONGEST_READING_SECONDS = 5.0  # a failed worker stays this long, so that others can read why
_LONGEST_WRITING_POLLS = 20  # for a numbered message: its worker may have ended before writing it
_SECONDS_BETWEEN_TRIES = 0.02
_MOST_ERRORS = 5  # of the store, one after the other
_NUM_MESSAGES = "messages"


@dataclass(frozen=True)
class Pace:
    """Time constants of a detector, in seconds."""

    interval: float
    silence: float  # without a new heartbeat, after which a worker counts as lost
    longest_gap: float  # of silence counted between two reads, because the reader itself may have been stopped
    sampling: float = float(
        "inf"
    )  # between two reads of the detector's thread; infinite if only the waiting thread reads


class Messages:
    """The workers' messages in a store, read by all in the same order, but by the ranks ``gone``."""

    def __init__(self, store: Any, num_workers: int, rank: int) -> None:
        self._store, self._num_workers, self._rank = store, num_workers, rank
        self._num_read = self._num_polls = 0
        self._published: set[str] = set()
        self.gone: set[int] = set()

    def publish(self, text: str, *, is_awaited: bool, tries_every: float = _SECONDS_BETWEEN_TRIES) -> None:
        """If ``is_awaited``, waits at most a few seconds until all other workers have read the message."""
        key = f"message {self._store.add(_NUM_MESSAGES, 1) - 1}"
        self._published.add(key)  # before set(), as read() skips this worker's own messages
        self._store.set(key, text)
        until = time.monotonic() + _LONGEST_READING_SECONDS
        while is_awaited and time.monotonic() < until:
            readers = set(range(self._num_workers)) - {self._rank} - self.gone
            if self._store.check([_read(key, rank) for rank in readers] or [key]):
                return
            time.sleep(tries_every)

    def read(self) -> Iterator[str]:
        """Yields new messages of other workers. A message counts as read when the next one is requested."""
        count = self._store.add(_NUM_MESSAGES, 0)
        while self._num_read < count:
            key = f"message {self._num_read}"
            is_there = self._store.check([key])
            self._num_polls += 1
            if not is_there and self._num_polls < _LONGEST_WRITING_POLLS:
                return
            self._num_read, self._num_polls = self._num_read + 1, 0
            if is_there and key not in self._published:
                yield self._store.get(key).decode()
                self._store.set(_read(key, self._rank), "")


class Beats:
    """Reads the other workers' heartbeats. Thread-safe."""

    def __init__(self, store: Any, num_workers: int, rank: int, pace: Pace) -> None:
        self._store, self._pace = store, pace
        self._others = [other for other in range(num_workers) if other != rank]
        self._beats: dict[int, bytes] = {}
        self._silence: dict[int, float] = {}  # seconds without a new heartbeat
        self._read_at = float("-inf")
        self._counting = threading.Lock()

    @property
    def age(self) -> float:
        return time.monotonic() - self._read_at

    def read(self) -> dict[int, bytes]:
        keys = {rank: _beat(rank) for rank in self._others}
        beats = {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}
        with self._counting:
            now = time.monotonic()
            gap = min(now - self._read_at, self._pace.longest_gap)
            for rank, beat in beats.items():
                self._silence[rank] = self._silence[rank] + gap if self._beats.get(rank) == beat else 0.0
            self._beats, self._read_at = beats, now
        return beats

    def silent(self) -> list[int]:
        """Ranks without a new heartbeat for `Pace.silence` seconds, at the last read."""
        with self._counting:
            return [rank for rank, seconds in self._silence.items() if seconds >= self._pace.silence]


class Listener(Protocol):
    def progress(self) -> str:
        """A text in each heartbeat."""
        ...

    def hear(self, message: str) -> None:
        """Called in the detector's thread with each message of another worker."""
        ...


class FailureDetector:
    """Sends this worker's heartbeats from a thread, and passes other workers' messages to a listener.

    A process has a detector for each step, and one for its rounds. The latter tolerates long silence, because
    compilations may block threads.
    """

    def __init__(self, store: Any, num_workers: int, rank: int, pace: Pace, listener: Listener | None = None) -> None:
        self._connection = OwnConnection(store, _LONGEST_CONNECTING_SECONDS)
        self._store: Any = self._connection.store
        self._rank, self._pace, self._listener = rank, pace, listener
        self.messages = Messages(self._store, num_workers, rank)
        self.beats = Beats(self._store, num_workers, rank, pace)
        self._asked_at: float | None = None  # start of the thread's request that the store has not answered yet
        self._does_not_answer = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirrorc heartbeats", daemon=True)

    def start(self) -> None:
        """The listener also receives messages sent before this call."""
        self._thread.start()

    def _run(self) -> None:
        number = num_errors = 0
        while not self._connection.is_lost:  # the store's host has ended, perhaps because training is over
            number += 1
            self._asked_at = time.monotonic()
            try:
                self._beat(number)
                num_errors = 0
            except RuntimeError as error:
                num_errors += 1
                logger.debug("the workers' store does not answer: %s", first_line(error))
            finally:
                self._asked_at = None
            if num_errors == _MOST_ERRORS or self._ending.wait(self._pace.interval * (1 + num_errors)):
                break
        self._does_not_answer = self._does_not_answer or num_errors == _MOST_ERRORS

    def _beat(self, number: int) -> None:
        progress = self._listener.progress() if self._listener is not None else ""
        self._store.set(_beat(self._rank), f"{number} {progress}")
        for message in self.messages.read():  # unlike set(), this waits for the store's answer
            if self._listener is not None:
                self._listener.hear(message)
        if self.beats.age > self._pace.sampling:
            self.beats.read()

    def publish(self, message: str) -> None:
        """Waits a bounded time until all workers except ``messages.gone`` have read the message. Raises nothing."""
        self._publish(message, _LONGEST_ANSWER_SECONDS + _LONGEST_READING_SECONDS, is_awaited=True)

    def _publish(self, message: str, seconds: float, *, is_awaited: bool) -> None:
        every = self._pace.interval / 4
        try:
            in_bounded_time(lambda: self.messages.publish(message, is_awaited=is_awaited, tries_every=every), seconds)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the workers' store is lost: %s", first_line(error))

    def find_silent(self, is_known: Callable[[], bool], slack_seconds: float) -> list[int] | None:
        """Ranks without heartbeats; None if the store does not answer.

        Takes some seconds, or ``slack_seconds`` if the thread has long waited for the store. Returns an empty list when
        ``is_known()`` says that the failure is known.
        """
        seconds = self._pace.silence + slack_seconds
        try:
            self._await_answer(seconds, slack_seconds, is_known)
            return self._await_beats(seconds, is_known)
        except (RuntimeError, TimeoutError):
            self._does_not_answer = True
            return None

    def _await_answer(self, seconds: float, slack_seconds: float, is_known: Callable[[], bool]) -> None:
        """Waits for a late answer of the store, which may hang, or answer now because this process was stopped."""
        asked_at, until = self._asked_at, time.monotonic() + slack_seconds
        if asked_at is None or time.monotonic() - asked_at < seconds:
            return
        while self._asked_at == asked_at and not is_known():
            if time.monotonic() > until:
                raise TimeoutError("the workers' store does not answer")
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def _await_beats(self, seconds: float, is_known: Callable[[], bool]) -> list[int]:
        """Returns ranks without a new heartbeat, once all are silent. ``seconds`` bounds each answer of the store."""
        earlier = in_bounded_time(self.beats.read, seconds)  # a beat since the last sample may precede the failure
        while True:
            beats = in_bounded_time(self.beats.read, seconds)
            if is_known():
                return []
            missing, silent = [rank for rank, beat in beats.items() if beat == earlier[rank]], self.beats.silent()
            if set(missing) <= set(silent):
                return missing
            time.sleep(self._pace.interval / 2)

    def close(self) -> None:
        self._ending.set()

    def leave(self, message: str) -> None:
        """Stops the heartbeats. Publishes the reason if the store still answers. Raises nothing.

        Waits a bounded time for the thread, which would abort the process if it returned from torch while Python ends.
        """
        is_closed = self._ending.is_set()
        self.close()
        asked_at = self._asked_at
        waited = time.monotonic() - asked_at if asked_at is not None else 0.0
        seconds = max(_SHORTEST_ANSWER_SECONDS, _LONGEST_ANSWER_SECONDS - waited)
        if not (is_closed or self._does_not_answer or self._connection.is_lost):
            self._publish(message, seconds, is_awaited=False)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(seconds)


def _beat(rank: int) -> str:
    return f"beat {rank}"


def _read(key: str, rank: int) -> str:
    return f"{key} was read by {rank}"
