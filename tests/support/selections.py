"""Which cases of a parametrized test `make test` runs, and which are for `make test-slow`, or for `make test-all`."""

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases of a parametrized test, marked slow; each is a tuple of its arguments."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def exhaustive(*cases: tuple[Any, ...]) -> list[Any]:
    """The same, for `make test-all` alone."""
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases of one argument, of which all are slow but the fast ones."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def thinned(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of one value of each axis, of which all are slow but a few that have every pair of values.

    With axes of 3, 3, 2 and 2 values, 9 or 10 of 36 combinations have, for any two axes, each value of the one together with
    each value of the other.
    """
    places = [range(len(axis)) for axis in axes]
    combinations = list(product(*places))
    missing = {pair for one in combinations for pair in _pairs(one)}
    chosen = set()
    while missing:
        best = max(combinations, key=lambda one: len(missing.intersection(_pairs(one))))
        chosen.add(best)
        missing.difference_update(_pairs(best))
    cases = {one: [axis[i] for axis, i in zip(axes, one, strict=True)] for one in combinations}
    return [
        pytest.param(*values, marks=[] if one in chosen else pytest.mark.slow, id="-".join(map(str, values)))
        for one, values in cases.items()
    ]


def _pairs(one: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    """The pairs of values in a combination: two axes, and the place of each one's value."""
    return {(i, one[i], j, one[j]) for i in range(len(one)) for j in range(i)}
