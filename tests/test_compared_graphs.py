"""The comparison of random graphs names those that differ, fail, or end their process, alone or together."""

import os
import signal
import time
from collections.abc import Sequence

import compared_graphs
import pytest
from compared_graphs import compared_in_processes


def ends_with_three(seeds: Sequence[int]) -> dict[int, str]:
    if 3 in seeds:
        os.kill(os.getpid(), signal.SIGKILL)
    return {seed: "differs" for seed in seeds if seed == 5}


def ends_with_two_and_six(seeds: Sequence[int]) -> dict[int, str]:
    if {2, 6} <= set(seeds):
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs_with_one(seeds: Sequence[int]) -> dict[int, str]:
    while 1 in seeds:
        time.sleep(60)
    return {}


def test_a_graph_that_ends_its_process_is_named_beside_those_that_differ() -> None:
    assert compared_in_processes(range(8), ends_with_three) == {3: "ends the process with -9", 5: "differs"}


def test_graphs_that_end_their_process_only_together_are_named_together() -> None:
    assert compared_in_processes(range(4, 8), ends_with_two_and_six) == {}
    expected = {0: "ends the process with -9 among [0, 1, 2, 3, 4, 5, 6, 7]"}
    assert compared_in_processes(range(8), ends_with_two_and_six) == expected


def test_a_graph_that_hangs_is_named() -> None:
    expected = {1: "takes more than 0.001 minutes"}
    assert compared_in_processes(range(1, 3), hangs_with_one, minutes=0.001) == expected


def test_a_graph_that_fails_is_named_beside_those_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_three(seeds: Sequence[int], backend: str) -> list[int]:
        if 3 in seeds:
            raise ValueError("a graph of three")
        return [seed for seed in seeds if seed == 5]

    monkeypatch.setattr(compared_graphs, "_differing_graphs", fails_with_three)
    assert compared_graphs.differing_graphs(range(8)) == {3: "ValueError: a graph of three", 5: "differs"}
