"""Heartbeats and messages in a store; here all workers are in one process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import failure_detector
from mirrorc.cluster.failure_detector import Beats, FailureDetector, Messages, Pace

FAST = Pace(interval=0.01, silence=0.05, longest_gap=0.02)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that detectors see."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(failure_detector, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    return clock


def test_silence_is_counted_between_reads_of_one_beat(clock: SimpleNamespace) -> None:
    store = distributed.HashStore()
    beats = Beats(store, 3, 0, Pace(interval=0.2, silence=2.0, longest_gap=0.5))
    store.set("beat 1", "1")
    for _ in range(5):
        assert beats.silent() == []
        beats.read()
        clock.now += 0.5
    store.set("beat 1", "2")
    beats.read()
    assert beats.silent() == [2]


def test_a_worker_that_was_stopped_itself_takes_nobody_for_silent(clock: SimpleNamespace) -> None:
    store = distributed.HashStore()
    beats = Beats(store, 2, 0, Pace(interval=0.2, silence=2.0, longest_gap=0.5))
    beats.read()
    clock.now += 1000.0
    beats.read()
    assert beats.silent() == [] and 0 < 0.5 < 2.0
    for _ in range(3):
        clock.now += 0.5
        beats.read()
    assert beats.silent() == [1]


def test_messages_are_read_in_one_order_and_not_by_their_worker() -> None:
    store = distributed.HashStore()
    first, second, third = (Messages(store, 3, rank) for rank in range(3))
    first.publish("a", is_awaited=False)
    second.publish("b", is_awaited=False)
    assert (list(first.read()), list(second.read()), list(third.read())) == (["b"], ["a"], ["a", "b"])
    assert list(third.read()) == []


def test_a_message_whose_worker_was_killed_while_it_published_holds_up_no_other() -> None:
    store = distributed.HashStore()
    reader, other = Messages(store, 3, 0), Messages(store, 3, 1)
    store.add(failure_detector._NUM_MESSAGES, 1)  # by worker 2, which is killed now
    other.publish("it raised", is_awaited=False)
    assert list(reader.read()) == [], "it may still come"
    polls = [list(reader.read()) for _ in range(failure_detector._LONGEST_WRITING_POLLS)]
    assert [text for poll in polls for text in poll] == ["it raised"]


def test_who_has_not_read_is_awaited_unless_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "_LONGEST_READING_SECONDS", 0.3)
    messages = Messages(distributed.HashStore(), 2, 0)
    began = time.monotonic()
    messages.publish("it raised", is_awaited=True)
    assert time.monotonic() - began > 0.3
    messages.gone.add(1)
    monkeypatch.setattr(failure_detector, "_LONGEST_READING_SECONDS", 300.0)
    messages.publish("it raised", is_awaited=True)


def test_a_thread_tells_that_a_worker_lives_and_how_far_it_is() -> None:
    store = distributed.HashStore()
    heard: list[str] = []
    detector = FailureDetector(store, 2, 1, FAST, SimpleNamespace(progress=lambda: "far", hear=heard.append))
    Messages(store, 2, 0).publish("earlier", is_awaited=False)
    detector.start()
    Messages(store, 2, 0).publish("later", is_awaited=True)
    until = time.monotonic() + 60
    while int(store.get("beat 1").split()[0]) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    number, progress = store.get("beat 1").decode().split()
    assert int(number) >= 3 and progress == "far" and heard == ["earlier", "later"]
    detector.close()


class Hanging:
    """A store whose host is stopped: it takes what it is told, and answers nothing from some moment on."""

    def __init__(self) -> None:
        self.answers, self.told = threading.Event(), threading.Event()
        self.answers.set()

    def clone(self) -> Hanging:
        return self

    def add(self, key: str, value: int) -> int:
        self.answers.wait(60)
        return value

    def set(self, key: str, value: str) -> None:
        if not self.answers.is_set():
            self.told.set()


def test_the_end_waits_once_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    store: Any = Hanging()
    lost, recent, answered = (FailureDetector(store, 2, 1, FAST) for _ in range(3))
    for detector in (lost, recent, answered):
        detector.start()
    store.answers.clear()
    until = time.monotonic() + 60
    while None in (lost._asked_at, recent._asked_at) and time.monotonic() < until:
        time.sleep(0.01)
    monkeypatch.setattr(failure_detector, "in_bounded_time", lambda function, seconds: bounds.append(seconds))
    longest = failure_detector._LONGEST_ANSWER_SECONDS
    lost._asked_at = time.monotonic() - longest
    lost.leave("it has ended")
    assert bounds.pop() == failure_detector._SHORTEST_ANSWER_SECONDS, "a heartbeat has waited as long"
    recent._asked_at = time.monotonic() - longest / 2
    recent.leave("it has ended")
    assert 0 < bounds.pop() <= longest / 2
    store.answers.set()
    while answered._asked_at is not None and time.monotonic() < until:
        time.sleep(0.01)
    answered.leave("it has ended")
    assert bounds and bounds[0] > longest / 2
    answered.leave("it has ended")
    assert len(bounds) == 1, "once"


SCRIPT = """
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from torch import distributed
from mirrorc.cluster.failure_detector import FailureDetector, Pace

store = distributed.HashStore()

def wait(key, value):  # as torch waits for a busy host: without the interpreter's lock
    asked.append(key)
    if key.startswith("beat"):
        with suppress(RuntimeError):
            store.wait(["never"], timedelta(seconds=0.5))

class Late:
    def __del__(self, sleep=time.sleep):  # while Python ends
        sleep(1)

asked, late = [], Late()
slow = SimpleNamespace(clone=lambda: slow, add=lambda key, value: 0, set=wait)
detector = FailureDetector(slow, 2, 1, Pace(0.001, 1.0, 0.1))
detector.start()
while not asked:
    time.sleep(0.01)
detector.leave("it has ended")
"""


def test_a_process_does_not_end_while_its_heartbeat_waits_for_the_store() -> None:
    """A thread that comes back from torch while Python ends would abort the process (signal 6)."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_for_which_the_thread_has_waited_long_is_not_waited_for_as_long_again() -> None:
    detector = FailureDetector(distributed.HashStore(), 2, 0, Pace(0.01, silence=1000.0, longest_gap=0.02))
    detector._asked_at = time.monotonic() - 2000.0
    assert detector.find_silent(lambda: False, slack_seconds=0.1) is None


def test_a_worker_that_was_stopped_hears_the_answer_of_the_store_first(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = FailureDetector(distributed.HashStore(), 2, 0, Pace(0.01, silence=1000.0, longest_gap=0.02))

    def answer(seconds: float) -> None:
        detector._asked_at = None

    monkeypatch.setattr(failure_detector, "time", SimpleNamespace(monotonic=time.monotonic, sleep=answer))
    detector._asked_at = time.monotonic() - 2000.0
    assert detector.find_silent(lambda: True, slack_seconds=30.0) == []
    detector._asked_at = time.monotonic()  # it has only just been asked
    assert detector.find_silent(lambda: True, slack_seconds=30.0) == []


def test_silent_workers_are_told_from_those_that_live() -> None:
    store = distributed.HashStore()
    detectors = [FailureDetector(store, 3, rank, Pace(0.01, silence=0.5, longest_gap=0.1)) for rank in range(2)]
    for detector in detectors:
        detector.start()
    assert detectors[0].find_silent(lambda: False, slack_seconds=30.0) == [2]
    assert detectors[0].find_silent(lambda: True, slack_seconds=30.0) == []
    for detector in detectors:
        detector.close()


def test_silence_of_before_counts(clock: SimpleNamespace) -> None:
    detector = FailureDetector(distributed.HashStore(), 2, 0, Pace(0.2, silence=2.0, longest_gap=0.5))
    for _ in range(5):
        detector.beats.read()
        clock.now += 1.0
    assert detector.find_silent(lambda: False, slack_seconds=1.0) == [1], "at once"
