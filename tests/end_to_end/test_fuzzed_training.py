"""Whatever happens between and during steps, a model trains as in plain PyTorch, or the step is refused and changes nothing.

Runs are drawn at random: a model, an optimizer, devices, and events with steps between them; `fuzzed_training` has them.
A run that fails is made shorter and printed as a ``Scenario(...)``. To repeat this run alone, in
``tests/support``: ``from fuzzed_training.scenarios import *`` and ``Scenario(...).play()``. To repeat all runs of a test,
set MIRRORC_FUZZING_SEED to the seed that is printed.
"""

import os
import random
from typing import Any

import pytest
from compared_graphs import differing_graphs
from fuzzed_operators import drawn_graph
from fuzzed_training.scenarios import NOT_REPEATABLE, draw_scenario, play_or_shorten
from fuzzing import FACTOR
from selections import exhaustive

from mirrorc import torch_internals as internals

RUNS_OF_A_CASE = 15  # few, so that no worker has a long one left when the others have nothing to do
MINUTES = 60.0


def play_runs(number: int, runs: int, **kinds: Any) -> None:
    chosen = int(os.environ.get("MIRRORC_FUZZING_SEED", number))
    for run in range(runs):
        try:
            play_or_shorten(draw_scenario(random.Random(f"{chosen}, {run}"), **kinds))
        except Exception as error:
            error.add_note(f"To repeat these runs: MIRRORC_FUZZING_SEED={chosen}; this is number {run}")
            raise


@pytest.mark.fast
def test_a_few_events_between_steps() -> None:
    play_runs(0, 4, max_events=3)


def test_events_between_steps() -> None:
    play_runs(0, 12, max_events=3)


def test_steps_with_dropout_can_be_repeated_bit_for_bit() -> None:
    play_runs(0, 3, max_events=4, is_repeated=True)


@pytest.mark.timeout(20 * MINUTES)
@pytest.mark.parametrize("case", range(3))
def test_more_events_between_steps(case: int) -> None:
    play_runs(1 + case, RUNS_OF_A_CASE, max_events=8, is_uneven=True)


@pytest.mark.timeout(20 * MINUTES)
def test_more_steps_with_dropout_can_be_repeated_bit_for_bit() -> None:
    play_runs(0, 10, max_events=8, is_uneven=True, is_repeated=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(20 * MINUTES)
@pytest.mark.parametrize("case", range(133))
def test_many_events_between_steps(case: int) -> None:
    left_out = NOT_REPEATABLE if case % 2 else ()
    play_runs(random.SystemRandom().randrange(2**32), RUNS_OF_A_CASE, max_events=12, is_uneven=True, left_out=left_out)


# Graphs of views, expansions, writes in place and indexing have the gradients of plain PyTorch under both backends.


OF_A_GRAPH = 5


def described(differing: dict[int, str]) -> dict[int, list[str]]:
    return {seed: [difference, *(name for name, _ in drawn_graph(seed))] for seed, difference in differing.items()}


@pytest.mark.parametrize("first", [0, 40])
def test_drawn_operators_under_the_eager_backend(first: int) -> None:
    assert described(differing_graphs(range(first, first + OF_A_GRAPH), "eager")) == {}


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("first", [10, *exhaustive(*[(OF_A_GRAPH * i,) for i in range(10 * FACTOR)])])
def test_drawn_operators_under_inductor(first: int) -> None:
    assert described(differing_graphs(range(first, first + OF_A_GRAPH))) == {}


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_views_with_gaps_that_inductor_lays_out_otherwise_reach_backward_in_their_strides() -> None:
    assert described(differing_graphs([48, 70, 177])) == {}
