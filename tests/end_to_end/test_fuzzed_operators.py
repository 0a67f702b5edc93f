"""Graphs of views, expansions, writes in place and indexing have the gradients of plain PyTorch under both backends."""

import pytest
from compared_graphs import differing_graphs
from fuzzed_operators import drawn_graph
from fuzzing import FACTOR
from selections import exhaustive

from mirrorc import torch_internals as internals

pytestmark = pytest.mark.slow
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
