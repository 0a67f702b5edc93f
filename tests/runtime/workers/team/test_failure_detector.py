"""What workers find out of each other in a store; here all are in one process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import Worker
from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.call_progress import Progress
from mirrorc.runtime.workers.protocol.call_state import Failure
from mirrorc.runtime.workers.team import failure_detector
from mirrorc.runtime.workers.team.failure_detector import Watcher


class Told:
    def __init__(self, store: distributed.Store, rank: int, num_workers: int = 3) -> None:
        self.failures: list[Failure] = []
        self.has_come = threading.Event()
        workers = [Worker(other, num_workers, "host", 1, {}) for other in range(num_workers)]
        self.watcher = Watcher(store, workers, rank, self.note)

    def note(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.has_come.set()


@pytest.mark.slow
def test_a_worker_on_which_others_have_given_up_is_told_so() -> None:
    store = distributed.HashStore()
    one, other = Told(store, 0), Told(store, 1)
    given_up = Failure(1, 4, "it gives no sign of life", is_final=True)
    one.watcher.publish(given_up, silent=[2])
    assert other.has_come.wait(30)
    assert other.failures == [given_up] and one.failures == []
    one.watcher.close()
    other.watcher.close()


@pytest.mark.slow
def test_who_has_left_is_not_waited_for() -> None:
    store = distributed.HashStore()
    both = [Told(store, rank, num_workers=2) for rank in range(2)]
    both[1].watcher.leave(Failure(1, 5, "its process has ended", is_final=True))
    assert both[0].has_come.wait(30)
    began = time.monotonic()
    both[0].watcher.publish(Failure(-1, 4, "the connection broke"))
    assert time.monotonic() - began < failure_detector._LONGEST_READING_SECONDS
    both[0].watcher.close()


@pytest.mark.slow
def test_who_has_not_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "_LONGEST_READING_SECONDS", 0.5)
    store = distributed.HashStore()
    both = [Told(store, rank) for rank in range(2)]  # the third one is not there
    began = time.monotonic()
    both[0].watcher.publish(Failure(0, 4, "it raised"))
    assert time.monotonic() - began > 0.5 and both[1].has_come.is_set()
    for told in both:
        told.watcher.close()


@pytest.mark.slow
def test_who_tells_nothing_is_silent() -> None:
    store = distributed.HashStore()
    both = [Told(store, rank) for rank in range(2)]  # the third one is not there
    assert both[0].watcher.find_silent(lambda: False) == [2]
    assert both[0].watcher.find_silent(lambda: True) == []
    for told in both:
        told.watcher.close()


@pytest.mark.slow
def test_who_has_told_nothing_for_long_is_known_at_once_unless_this_worker_has_not_listened() -> None:
    both = [Told(distributed.HashStore(), rank, num_workers=2) for rank in range(2)]  # each is alone in its store
    for told in both:
        told.watcher.close()
        told.watcher._thread.join()
        long_ago = time.monotonic() - 100
        told.watcher._heard = {1 - told.watcher._rank: (b"", long_ago)}
        told.watcher._heard_at = time.monotonic()
    both[0].watcher._silent_seconds, both[1].watcher._silent_seconds = 50.0, 0.3
    assert both[0].watcher.find_silent(lambda: False) == [1]
    both[1].watcher._heard_at = long_ago
    began = time.monotonic()
    assert both[1].watcher.find_silent(lambda: False) == [0] and time.monotonic() - began > 0.3


def test_a_store_for_which_the_thread_has_waited_long_is_not_waited_for_as_long_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_detector, "_SLACK_SECONDS", 0.1)
    told = Told(distributed.HashStore(), 0, num_workers=2)
    told.watcher.close()
    told.watcher._thread.join()
    assert told.watcher._asked_at is None
    told.watcher._silent_seconds = 1000.0
    told.watcher._asked_at = time.monotonic() - 2000.0
    assert told.watcher.find_silent(lambda: False) is None

    def answer(seconds: float) -> None:
        told.watcher._asked_at = None  # this worker was stopped meanwhile, and hears the answer now

    monkeypatch.setattr(failure_detector.time, "sleep", answer)
    told.watcher._asked_at = time.monotonic() - 2000.0
    assert told.watcher.find_silent(lambda: True) == []
    told.watcher._asked_at = time.monotonic()  # it has only just been asked
    assert told.watcher.find_silent(lambda: True) == []


def test_workers_that_look_seldom_are_silent_later() -> None:
    few, many = (Told(distributed.HashStore(), 0, number) for number in (300, 1000))
    assert few.watcher._silent_seconds == 2.0 and many.watcher._silent_seconds == 3 * many.watcher._interval == 6.0
    few.watcher.close()
    many.watcher.close()


def test_how_far_others_are_is_told_with_their_signs_of_life() -> None:
    store = distributed.HashStore()
    one, other = Told(store, 0, 2), Told(store, 1, 2)
    other.watcher.local_progress = Progress().begun(3).met().sent()
    told = {}
    until = time.monotonic() + 30
    while told.get(1) != other.watcher.local_progress and time.monotonic() < until:
        told = one.watcher.progress()
    assert told == {0: Progress(), 1: Progress(3, 1, 1)}
    one.watcher.close()
    other.watcher.close()


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
        Watcher(stopped, workers, 1, Told.note)
    goes_on.set()
