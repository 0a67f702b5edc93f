"""What workers that have joined find out of each other's processes; here all are in one, but for those that end."""

import subprocess
import sys
import time
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import Worker, lost_in_rounds
from mirrorc.cluster.failure_detector import Pace
from mirrorc.cluster.lost_in_rounds import Lookout, Presence, pace_of_rounds
from mirrorc.cluster.membership import local_system
from mirrorc.cluster.rounds import Round
from mirrorc.errors import CommunicationError


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_in_rounds, "_SECONDS_BETWEEN_LOOKS", 0.0)


PACE = pace_of_rounds(3)
FAST = Pace(interval=0.01, silence=0.05, longest_gap=0.02)


def elsewhere(num_workers: int) -> list[Worker]:
    return [Worker(rank, num_workers, f"host-{rank}", 2**30, {}, "another system") for rank in range(num_workers)]


def test_a_worker_that_ends_says_what_has_ended_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    lookout = Lookout(store, elsewhere(3), 0, PACE)
    presence = Presence(store, 3, 2, PACE)
    assert lookout.gone() == {}
    monkeypatch.setattr(sys, "last_value", ValueError("there is\nno data."), raising=False)
    presence.end()
    assert lookout.gone() == {2: "its process has ended, after ValueError: there is no data"}
    assert Lookout(store, elsewhere(3), 2, PACE).gone() == {}  # nobody looks out for itself


def test_of_a_long_error_the_beginning_and_the_end_are_told() -> None:
    lines = [
        "Caught OSError in DataLoader worker process 0.",
        "Original Traceback:",
        *["  File"] * 400,
        "OSError: bad file",
    ]
    told = lost_in_rounds.in_short(OSError("\n".join(lines)))
    assert told.startswith("OSError: Caught OSError in DataLoader worker process 0. Original Traceback: File")
    assert told.endswith("File OSError: bad file") and len(told) < 700
    assert lost_in_rounds.in_short(OSError("short.")) == "OSError: short"


def test_a_child_that_was_forked_says_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    presence = Presence(store, 2, 1, PACE)
    with monkeypatch.context() as child:
        child.setattr(lost_in_rounds.os, "getpid", lambda: 1)
        presence.end()
    assert Lookout(store, elsewhere(2), 0, PACE).gone() == {}
    presence.end()
    assert Lookout(store, elsewhere(2), 0, PACE).gone() == {1: "its process has ended"}


@pytest.mark.skipif(not local_system(), reason="this system has no /proc")
def test_a_process_of_this_system_that_was_killed_is_gone_at_once() -> None:
    store = distributed.HashStore()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for system, expected in ((local_system(), {1: "its process has ended"}), ("another system", {})):
            lookout = Lookout(store, [Worker(0, 2), Worker(1, 2, "host", process.pid, {}, system)], 0, PACE)
            if process.poll() is None:
                assert lookout.gone() == {}
                process.kill()
            process.wait()
            assert lookout.gone() == expected
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_tells_nothing_more_is_gone() -> None:
    store = distributed.HashStore()
    lookout = Lookout(store, elsewhere(2), 0, FAST)
    store.set("beat 1", "1")
    assert lookout.gone() == {}
    until = time.monotonic() + 60
    while not (gone := lookout.gone()) and time.monotonic() < until:
        pass
    assert gone == {1: "it gives no sign of life: it has ended, or hangs"}
    store.set("beat 1", "2")
    while (gone := lookout.gone()) and time.monotonic() < until:
        pass
    assert gone == {}, "it had hung"


def test_all_who_wait_in_a_round_raise_the_same_error_when_one_is_gone() -> None:
    store: Any = distributed.HashStore()
    workers = elsewhere(3)
    rounds = [
        Round(store, workers, rank, "round/0", "mirrorc.compile", Lookout(store, workers, rank, PACE))
        for rank in (0, 1)
    ]
    Presence(store, 3, 2, PACE).end()
    raised = []
    for own in rounds:
        with pytest.raises(CommunicationError) as error:
            own.all_say("here", timeout_seconds=60)
        raised.append(str(error.value))
    assert (
        raised
        == [
            f"MC6203: {workers[2]} does not come to mirrorc.compile\n  why:  its process has ended\n  fix:  end all "
            "workers, and start them again"
        ]
        * 2
    )
