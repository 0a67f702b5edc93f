"""The profiler of one thread sees what another thread does for it, and nothing else."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import seen_by_profiler


def in_a_thread(*jobs: Callable[[], Any]) -> list[Any]:
    given: list[Any] = []

    def run() -> None:
        for job in jobs:
            try:
                given.append(job())
            except ArithmeticError as error:
                given.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return given


def doing(name: str) -> Callable[[], bool]:
    def job() -> bool:
        with record_function(name):
            torch.ones(2).cumsum(0)
        return internals.is_profiled()

    return job


def counts(profiled: profile) -> dict[str, int]:
    return {event.key: event.count for event in profiled.key_averages()}


def test_a_job_is_seen_and_what_the_thread_does_before_and_after_is_not() -> None:
    for _ in range(3):  # a profiler leaves nothing behind
        assert not internals.is_profiled()
        with profile() as profiled:
            assert internals.is_profiled()
            is_seen = in_a_thread(doing("before"), seen_by_profiler(doing("job")), doing("after"))
        assert is_seen == [False, True, False]
        found = counts(profiled)
        assert found["job"] == 1 and found["aten::cumsum"] == 1
        assert not {"before", "after"} & found.keys()


def test_a_job_that_fails_leaves_its_thread_as_it_was() -> None:
    def fail() -> None:
        raise ArithmeticError

    with profile() as profiled:
        error, is_seen = in_a_thread(seen_by_profiler(fail), doing("after"))
    assert isinstance(error, ArithmeticError) and not is_seen
    assert "after" not in counts(profiled)


@pytest.mark.parametrize("count", [2, 4])
def test_threads_are_seen_side_by_side(count: int) -> None:
    meeting = threading.Barrier(count)

    def job() -> None:
        meeting.wait(timeout=30)
        torch.ones(2).cumsum(0)

    with profile() as profiled:
        threads = [threading.Thread(target=seen_by_profiler(job)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts(profiled)["aten::cumsum"] == count
    assert len({event.thread for event in profiled.events() if event.key == "aten::cumsum"}) == count
