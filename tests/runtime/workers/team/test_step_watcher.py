"""What a step's workers learn of each other; here all are in one process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import Worker, failure_detector
from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.call_state import Failure, Progress
from mirrorc.runtime.workers.team.step_watcher import StepWatcher, pace_of_steps


class Listening:
    """A watcher, and the failures that it has passed on."""

    def __init__(self, store: distributed.Store, rank: int, num_workers: int = 3) -> None:
        self.failures: list[Failure] = []
        self.has_come = threading.Event()
        workers = [Worker(other, num_workers, "host", 1, {}) for other in range(num_workers)]
        self.watcher = StepWatcher(store, workers, rank, self.note)

    def note(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.has_come.set()

    def close(self) -> None:
        self.watcher.detector.close()


def test_a_worker_on_which_others_have_given_up_hears_so() -> None:
    store = distributed.HashStore()
    first, second = Listening(store, 0), Listening(store, 1)
    given_up = Failure(1, 4, "it gives no sign of life", is_final=True)
    first.watcher.publish(given_up, silent=[2])
    assert second.has_come.wait(30)
    assert second.failures == [given_up] and first.failures == []
    first.close()
    second.close()


def test_who_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "_LONGEST_READING_SECONDS", 300.0)
    store = distributed.HashStore()
    both = [Listening(store, rank, num_workers=2) for rank in range(2)]
    both[1].watcher.leave(Failure(1, 5, "its process has ended", is_final=True))
    assert both[0].has_come.wait(30)
    until = time.monotonic() + 30
    while not both[0].watcher.detector.messages.gone and time.monotonic() < until:
        time.sleep(0.01)
    both[0].watcher.detector.messages.publish(Failure(-1, 4, "").to_text(), is_awaited=True)
    both[0].close()


def test_workers_that_look_seldom_are_silent_later() -> None:
    few, many = pace_of_steps(300), pace_of_steps(1000)
    assert few.silence == 2.0 and many.silence == 3 * many.interval == 6.0
    assert few.longest_gap < few.silence / 2 and many.longest_gap < many.silence / 2, (
        "a stop of the reader is no silence"
    )


def test_how_far_others_are_comes_with_their_heartbeats() -> None:
    store = distributed.HashStore()
    first, second = Listening(store, 0, 2), Listening(store, 1, 2)
    second.watcher.local_progress = Progress().begun(3).met().sent()
    known: dict[int, Progress] = {}
    until = time.monotonic() + 30
    while known.get(1) != second.watcher.local_progress and time.monotonic() < until:
        known = first.watcher.progress_of_all()
    assert known == {0: Progress(), 1: Progress(3, 1, 1)}
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("failure", "ended"),
    [(Failure(0, 3, ""), [False, True, False]), (Failure(0, 3, "", is_final=True), [False, True, True])],
)
def test_which_calls_a_failure_ends(failure: Failure, ended: list[bool]) -> None:
    assert [failure.ends(call) for call in (2, 3, 4)] == ended


def test_a_store_that_takes_connections_and_does_not_answer_is_not_waited_for_without_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_detector, "_LONGEST_CONNECTING_SECONDS", 0.1)
    goes_on = threading.Event()
    stopped: Any = SimpleNamespace(add=lambda *_: goes_on.wait(60))
    workers = [Worker(other, 2, "host", 1, {}) for other in range(2)]
    with pytest.raises(CommunicationError, match=r"worker 1 \(host, process 1\): the workers' store does not answer"):
        StepWatcher(stopped, workers, 1, Listening.__new__(Listening).note)
    goes_on.set()
