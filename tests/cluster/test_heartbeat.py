"""What workers that have joined find out of each other's processes; here all are in one, but for those that end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import Worker, heartbeat
from mirrorc.cluster.heartbeat import Lookout, SignsOfLife
from mirrorc.cluster.membership import local_system
from mirrorc.cluster.rounds import Round
from mirrorc.errors import CommunicationError


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_SECONDS_BETWEEN_LOOKS", 0.0)


def elsewhere(num_workers: int) -> list[Worker]:
    return [Worker(rank, num_workers, f"host-{rank}", 2**30, {}, "another system") for rank in range(num_workers)]


def test_a_worker_that_ends_says_what_has_ended_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    lookout = Lookout(store, elsewhere(3), 0)
    signs = SignsOfLife(store, 3, 2)
    assert lookout.gone() == {}
    monkeypatch.setattr(sys, "last_value", ValueError("there is\nno data."), raising=False)
    signs._end()
    assert lookout.gone() == {2: "its process has ended, after ValueError: there is no data"}
    assert Lookout(store, elsewhere(3), 2).gone() == {}  # nobody looks out for itself


def test_of_a_long_error_the_beginning_and_the_end_are_told() -> None:
    lines = [
        "Caught OSError in DataLoader worker process 0.",
        "Original Traceback:",
        *["  File"] * 400,
        "OSError: bad file",
    ]
    told = heartbeat.in_short(OSError("\n".join(lines)))
    assert told.startswith("OSError: Caught OSError in DataLoader worker process 0. Original Traceback: File")
    assert told.endswith("File OSError: bad file") and len(told) < 700
    assert heartbeat.in_short(OSError("short.")) == "OSError: short"


def test_a_child_that_was_forked_says_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    signs = SignsOfLife(store, 2, 1)
    with monkeypatch.context() as child:
        child.setattr(heartbeat.os, "getpid", lambda: 1)
        signs._end()
    assert Lookout(store, elsewhere(2), 0).gone() == {}
    signs._end()
    assert Lookout(store, elsewhere(2), 0).gone() == {1: "its process has ended"}


@pytest.mark.skipif(not local_system(), reason="this system has no /proc")
def test_a_process_of_this_system_that_was_killed_is_gone_at_once() -> None:
    store = distributed.HashStore()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for system, expected in ((local_system(), {1: "its process has ended"}), ("another system", {})):
            lookout = Lookout(store, [Worker(0, 2), Worker(1, 2, "host", process.pid, {}, system)], 0)
            if process.poll() is None:
                assert lookout.gone() == {}
                process.kill()
            process.wait()
            assert lookout.gone() == expected
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_tells_nothing_more_is_gone_however_long_this_one_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "_FEWEST_SECONDS_BETWEEN_BEATS", 0.0)
    monkeypatch.setattr(heartbeat, "_MOST_BEATS_PER_SECOND", 1e9)
    monkeypatch.setattr(heartbeat, "_SILENT_BEATS", 3)
    store = distributed.HashStore()
    lookout = Lookout(store, elsewhere(2), 0)
    store.set("beat/1", "1")
    for _ in range(3):
        assert lookout.gone() == {}
    store.set("beat/1", "2")  # just in time
    for _ in range(3):
        assert lookout.gone() == {}
    assert lookout.gone() == {1: "it gives no sign of life: it has ended, or hangs"}


def test_a_thread_tells_that_a_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_FEWEST_SECONDS_BETWEEN_BEATS", 0.01)
    store = distributed.HashStore()
    signs = SignsOfLife(store, 2, 1)
    until = time.monotonic() + 60
    while int(store.get("beat/1")) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert int(store.get("beat/1")) >= 2
    signs._end()


class Hanging:
    """A store whose host is stopped: it takes what it is told, and answers nothing from some moment on."""

    def __init__(self) -> None:
        self.answers, self.told = threading.Event(), threading.Event()
        self.answers.set()

    def clone(self) -> Hanging:
        return self

    def add(self, key: str, value: int) -> int:
        return value

    def set(self, key: str, value: str) -> None:
        if not self.answers.is_set():
            self.told.set()

    def check(self, keys: list[str]) -> bool:
        return self.answers.wait(60)


def test_the_end_of_a_process_waits_once_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_FEWEST_SECONDS_BETWEEN_BEATS", 0.01)
    bounds: list[float] = []
    store = Hanging()
    lost, recent, answered = (SignsOfLife(store, 2, 1) for _ in range(3))
    store.answers.clear()
    assert store.told.wait(60)
    until = time.monotonic() + 60
    while None in (lost._asked_at, recent._asked_at) and time.monotonic() < until:
        time.sleep(0.01)
    monkeypatch.setattr(heartbeat, "in_bounded_time", lambda function, seconds: bounds.append(seconds))
    lost._asked_at = time.monotonic() - heartbeat._LONGEST_ANSWER_SECONDS
    lost._end()
    assert bounds.pop() == heartbeat._SHORTEST_ANSWER_SECONDS, "a sign of life has waited as long"
    recent._asked_at = time.monotonic() - heartbeat._LONGEST_ANSWER_SECONDS / 2
    recent._end()
    assert 0 < bounds.pop() <= heartbeat._LONGEST_ANSWER_SECONDS / 2
    store.answers.set()
    while answered._asked_at is not None and time.monotonic() < until:
        time.sleep(0.01)
    answered._end()
    assert bounds and bounds[0] > heartbeat._LONGEST_ANSWER_SECONDS / 2


def test_all_who_wait_in_a_round_raise_the_same_error_when_one_is_gone() -> None:
    store: Any = distributed.HashStore()
    workers = elsewhere(3)
    rounds = [
        Round(store, workers, rank, "round/0", "mirrorc.compile", Lookout(store, workers, rank)) for rank in (0, 1)
    ]
    SignsOfLife(store, 3, 2)._end()
    raised = []
    for own in rounds:
        with pytest.raises(CommunicationError) as error:
            own.all_say("here", timeout_seconds=60)
        raised.append(str(error.value))
    assert (
        raised
        == [
            f"{workers[2]} does not come to mirrorc.compile: its process has ended. End all workers, and start them again"
        ]
        * 2
    )
