"""Cuts of least capacity, against all cuts of small networks."""

import itertools
import random

import pytest

from mirrorc.analysis.memory.segments import UNCUTTABLE, Network


def capacity(edges: list[tuple[int, int, int]], side: set[int]) -> int:
    return sum(own for start, end, own in edges if start in side and end not in side)


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_has_less_capacity_and_none_of_the_same_is_nearer_to_the_source(seed: int) -> None:
    draw = random.Random(seed)
    num_nodes = draw.randint(2, 8)
    pairs = list(itertools.permutations(range(num_nodes), 2))
    edges = [(*draw.choice(pairs), draw.choice((0, 1, 2, 3, 7))) for _ in range(draw.randint(1, 20))]
    network = Network(num_nodes)
    for edge in edges:
        network.join(*edge)
    found = network.side_of_source()
    rest = range(2, num_nodes)
    sides = [{0, *some} for size in range(num_nodes - 1) for some in itertools.combinations(rest, size)]
    least = min(capacity(edges, side) for side in sides)
    assert capacity(edges, found) == least
    assert all(found <= side for side in sides if capacity(edges, side) == least)


def test_an_edge_that_no_cut_has_holds_its_ends_together() -> None:
    network = Network(4)
    network.join(0, 2, UNCUTTABLE)
    network.join(2, 3, 5)
    network.join(3, 1, 9)
    assert network.side_of_source() == {0, 2}
