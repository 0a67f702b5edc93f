"""Numbers of Python and numpy that change between steps and become inputs of programs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)


class ChangingNumbers:
    """Numbers that have changed between calls of a step, by their Python expressions.

    A Python number is a constant of the first program, and a graph input from its second value on. Numpy's numbers are
    inputs from the start. A number that cannot be an input gets a program for each value.

    Attributes:
        can_be_drawn: random numbers that forward draws in Python become inputs. False with CUDA graphs, which would
            replay the first draw.
    """

    def __init__(self, *, can_be_inputs: bool = True) -> None:
        self._can_be_inputs = self.can_be_drawn = can_be_inputs
        self._names: set[str] = set()
        self._given_up: dict[str, str] = {}

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset(self._names - self._given_up.keys()) if self._can_be_inputs else frozenset()

    @property
    def constants(self) -> frozenset[str] | None:
        """The numbers that cannot be inputs; None if no number can."""
        return frozenset(self._given_up) if self._can_be_inputs else None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        before, self._can_be_inputs = self._can_be_inputs, False
        try:
            yield
        finally:
            self._can_be_inputs = before

    def add(self, names: Iterable[str]) -> None:
        self._names.update(names)

    def give_up(self, names: Collection[str], why: str, words: Sequence[str] = ()) -> None:
        """Makes numbers constants from now on; ``words`` are the user's names for them."""
        logger.info("%s: constant in each program, because %s", ", ".join(sorted(names)), why)
        for name in names:
            self._given_up.setdefault(name, f"{' and '.join(words)}: {why}" if words else why)

    @property
    def reasons(self) -> list[str]:
        return list(dict.fromkeys(self._given_up.values()))
