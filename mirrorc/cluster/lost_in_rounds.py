"""Detects workers that are lost in rounds. Each process announces its own end."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from mirrorc.cluster.failure_detector import Beats, FailureDetector, Messages, Pace
from mirrorc.cluster.membership import Worker, local_system

_FEWEST_SECONDS_BETWEEN_BEATS = 1.0
_MOST_BEATS_PER_SECOND = 100.0  # of all workers together, at one store
_SILENT_BEATS = 30  # missed until a worker counts as lost: Python may block its threads for long
_SECONDS_BETWEEN_LOOKS = 0.2
_LONGEST_TEXT = 600  # of an error in a message to the others


def pace_of_rounds(num_workers: int) -> Pace:
    """Tolerates long compilations."""
    interval = max(_FEWEST_SECONDS_BETWEEN_BEATS, num_workers / _MOST_BEATS_PER_SECOND)
    return Pace(interval, silence=_SILENT_BEATS * interval, longest_gap=interval)


class Presence:
    """Sends heartbeats until this process ends; then publishes the reason, if possible."""

    def __init__(self, store: Any, num_workers: int, rank: int, pace: Pace) -> None:
        self._rank, self._pid = rank, os.getpid()
        self.detector = FailureDetector(store, num_workers, rank, pace)
        self.detector.start()
        atexit.register(self.end)

    def end(self) -> None:
        if os.getpid() == self._pid:
            self.detector.leave(f"{self._rank} its process has ended{cause_of_exit()}")


class Lookout:
    def __init__(self, store: Any, workers: Sequence[Worker], rank: int, pace: Pace) -> None:
        self._others = [worker for worker in workers if worker.rank != rank]
        self._system, self._pace = local_system(), pace
        self._messages = Messages(store, len(workers), rank)
        self._beats = Beats(store, len(workers), rank, pace)
        self._looked_at = float("-inf")
        self._ends: dict[int, str] = {}

    def gone(self) -> dict[int, str]:
        """Why workers were lost, by rank, as clauses. Reads the store at intervals; empty between them."""
        now = time.monotonic()
        if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return {}
        self._looked_at = now
        for message in self._messages.read():
            ended, _, text = message.partition(" ")
            self._ends[int(ended)] = text
        fates = {worker.rank: self._ends[worker.rank] for worker in self._others if worker.rank in self._ends}
        for worker in self._others:
            if self._system and worker.system == self._system and _has_ended(worker.pid):
                fates.setdefault(worker.rank, "its process has ended")
        if self._beats.age >= self._pace.interval:
            self._beats.read()
            for rank in self._beats.silent():
                fates.setdefault(rank, "it gives no sign of life: it has ended, or hangs")
        return fates


def cause_of_exit() -> str:
    """The uncaught error that ended the script, as the end of a clause; may be empty."""
    raised = getattr(sys, "last_value", None)
    return f", after {in_short(raised)}" if isinstance(raised, BaseException) else ""


def in_short(error: BaseException, longest: int | None = _LONGEST_TEXT) -> str:
    """An error on one line. Long texts are cut in the middle, because DataLoader's tracebacks end with the cause."""
    text = f"{error}".strip()
    if longest is not None and len(text) > longest:
        text = f"{text[: longest // 2]} … {text[-(longest // 2) :]}"
    line = " ".join(text.split()).rstrip(".")
    return f"{type(error).__name__}{': ' if line else ''}{line}"


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no permission
        return False
