"""What workers find out of each other in a store; here all are in one process."""

from __future__ import annotations

import threading

import pytest
from torch import distributed

from mirrorc.cluster import Worker
from mirrorc.runtime.workers.watcher import Failure, Watcher


class Told:
    """What a watcher has told."""

    def __init__(self, store: distributed.Store, rank: int, num_workers: int = 3) -> None:
        self.failures: list[Failure] = []
        self.has_come = threading.Event()
        workers = [Worker(other, num_workers, "host", 1, {}) for other in range(num_workers)]
        self.watcher = Watcher(store, workers, rank, self.note)

    def note(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.has_come.set()


def test_a_worker_on_which_others_have_given_up_is_told_so() -> None:
    store = distributed.HashStore()
    one, other = Told(store, 0), Told(store, 1)
    given_up = Failure(1, 4, "it gives no sign of life", is_final=True)
    one.watcher.publish(given_up, num_silent=1)
    assert other.has_come.wait(30)
    assert other.failures == [given_up] and one.failures == []
    one.watcher.close()
    other.watcher.close()


def test_who_tells_nothing_is_silent() -> None:
    store = distributed.HashStore()
    both = [Told(store, rank) for rank in range(2)]  # the third one is not there
    assert both[0].watcher.find_silent(lambda: False) == [2]
    assert both[0].watcher.find_silent(lambda: True) == []
    for told in both:
        told.watcher.close()


@pytest.mark.parametrize(
    ("failure", "ended"),
    [(Failure(0, 3, ""), [False, True, False]), (Failure(0, 3, "", is_final=True), [False, True, True])],
)
def test_which_calls_a_failure_ends(failure: Failure, ended: list[bool]) -> None:
    assert [failure.ends(call) for call in (2, 3, 4)] == ended
