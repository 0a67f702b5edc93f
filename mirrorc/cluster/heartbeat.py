"""Heartbeats of joined workers: each writes beats to their store, and at its end the reason."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.membership import Worker, local_system
from mirrorc.cluster.stores import OwnConnection, first_line

logger = logging.getLogger(__name__)

_FEWEST_SECONDS_BETWEEN_BEATS = 1.0
_MOST_BEATS_PER_SECOND = 100.0  # of all workers together, at one store
_SECONDS_BETWEEN_LOOKS = 0.2
_SILENT_BEATS = 30  # after which a worker is not waited for: Python may hold its threads up for long
_LONGEST_ANSWER_SECONDS = 3.0  # of the store
_SHORTEST_ANSWER_SECONDS = 0.3  # where a sign of life has waited for it: this process may have been stopped meanwhile
_LONGEST_CONNECTING_SECONDS = 20.0
_LONGEST_TEXT = 600  # of an error that is told to the others
_NUM_ENDED = "ended"


class SignsOfLife:
    """Sends this worker's heartbeat from a thread until its process ends, and then the reason, if it still can.

    Args:
        store: the workers' store; nothing else uses its keys but a `Lookout`. The thread has a separate connection.
        num_workers: the number of workers.
        rank: of this one.

    Raises:
        RuntimeError, TimeoutError: the store was lost, or does not answer.
    """

    def __init__(self, store: Any, num_workers: int, rank: int) -> None:
        self._connection = OwnConnection(store, _LONGEST_CONNECTING_SECONDS)
        self._store = self._connection.store
        self._rank, self._pid = rank, os.getpid()
        self._interval = _seconds_between_beats(num_workers)
        self._ending = threading.Event()
        self._asked_at: float | None = None  # when the store was asked something that it has not answered yet
        self._store.set(_beat(rank), "0")
        threading.Thread(target=self._tell, name="mirrorc signs of life", daemon=True).start()
        atexit.register(self._end)

    def _tell(self) -> None:
        number = 0
        while not self._ending.wait(self._interval) and not self._connection.is_lost:
            number += 1
            try:
                self._asked_at = time.monotonic()
                self._store.set(_beat(self._rank), str(number))
                self._store.check([_beat(self._rank)])  # which awaits an answer, as telling does not
                self._asked_at = None
            except RuntimeError as error:  # its host has ended, because all is done, perhaps
                logger.debug("the workers' store is lost: %s", first_line(error))
                self._ending.set()

    def _end(self) -> None:
        """Called at the interpreter's exit, also in a forked child, which is no worker."""
        if os.getpid() != self._pid or self._ending.is_set() or self._connection.is_lost:
            return
        self._ending.set()
        text = f"its process has ended{cause_of_exit()}"
        asked_at = self._asked_at
        waited = time.monotonic() - asked_at if asked_at is not None else 0.0
        seconds = max(_SHORTEST_ANSWER_SECONDS, _LONGEST_ANSWER_SECONDS - waited)
        try:
            in_bounded_time(lambda: self._tell_the_end(text), seconds)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the workers' store is lost: %s", first_line(error))

    def _tell_the_end(self, text: str) -> None:
        self._store.set(_end(self._rank), text)
        self._store.add(_NUM_ENDED, 1)


class Lookout:
    """Detects lost workers while this one waits for others in their store.

    Args:
        store: that of their `SignsOfLife`.
        workers: all, by rank.
        rank: of this one.
    """

    def __init__(self, store: Any, workers: Sequence[Worker], rank: int) -> None:
        self._store = store
        self._others = [worker for worker in workers if worker.rank != rank]
        self._system = local_system()
        self._interval = _seconds_between_beats(len(workers))
        self._looked_at = self._heard_at = float("-inf")
        self._heard: dict[int, tuple[bytes, int]] = {}  # the beat of each, and how often it was heard again

    def gone(self) -> dict[int, str]:
        """The fates of lost workers, as clauses, by rank. Asks at intervals, and returns nothing in between.

        Raises:
            RuntimeError: the store was lost.
        """
        now = time.monotonic()
        if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return {}
        self._looked_at = now
        fates: dict[int, str] = {}
        if self._store.add(_NUM_ENDED, 0):
            fates = {
                worker.rank: self._store.get(_end(worker.rank)).decode()
                for worker in self._others
                if self._store.check([_end(worker.rank)])
            }
        for worker in self._others:
            if self._system and worker.system == self._system and _has_ended(worker.pid):
                fates.setdefault(worker.rank, "its process has ended")
        if now - self._heard_at >= self._interval:
            self._heard_at = now
            for rank in self._silent():
                fates.setdefault(rank, "it gives no sign of life: it has ended, or hangs")
        return fates

    def _silent(self) -> list[int]:
        """Counts checks without a new beat instead of seconds, because this worker may itself have been stopped."""
        for worker in self._others:
            key = _beat(worker.rank)
            beat = self._store.get(key) if self._store.check([key]) else b""
            last, times = self._heard.get(worker.rank, (None, 0))
            self._heard[worker.rank] = (beat, times + 1 if beat == last else 0)
        return [rank for rank, (_, times) in self._heard.items() if times >= _SILENT_BEATS]


def cause_of_exit() -> str:
    """The error that ended the script, as the end of a clause; empty without one, or if it was caught."""
    raised = getattr(sys, "last_value", None)
    return f", after {in_short(raised)}" if isinstance(raised, BaseException) else ""


def in_short(error: BaseException, longest: int | None = _LONGEST_TEXT) -> str:
    """An error for other workers: its name and its text on one line, or the beginning and the end of a long text.

    The end of a long one, such as of a DataLoader's worker, is often the last line of a traceback, with the cause.
    """
    text = f"{error}".strip()
    if longest is not None and len(text) > longest:
        text = f"{text[: longest // 2]} … {text[-(longest // 2) :]}"
    line = " ".join(text.split()).rstrip(".")
    return f"{type(error).__name__}{': ' if line else ''}{line}"


def _has_ended(pid: int) -> bool:
    """True if this system has no such process, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # it is not ours to look at
        return False


def _seconds_between_beats(num_workers: int) -> float:
    return max(_FEWEST_SECONDS_BETWEEN_BEATS, num_workers / _MOST_BEATS_PER_SECOND)


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _end(rank: int) -> str:
    return f"end/{rank}"
