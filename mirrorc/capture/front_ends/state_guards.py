"""Checks the Python state that a graph depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Guards(Protocol):
    """Checks Python state that is not in the key of a specialization. Runs before every step, in microseconds."""

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The Python numbers that are inputs of the graph, as read by `hold`."""

    @property
    def draws(self) -> Sequence[object]:
        """Each step's draws from Python's random and numpy's, in order."""

    def begin_step(self) -> Callable[[], None]:
        """Advances generators past the draws of `hold`, and reads Python state. Returns a function that undoes the
        step.
        """

    def changed_numbers(self) -> list[str]:
        """Expressions of numbers that differ from the graph's constants."""

    def hold(self) -> bool:
        """True if a trace would read the same state."""

    def broken(self) -> str:
        """Describes the change, with its line, after `hold` has returned False."""


class AllGuards:
    def __init__(self, parts: Sequence[Guards] = ()) -> None:
        self._parts = tuple(parts)

    @property
    def numbers(self) -> tuple[int | float, ...]:
        return tuple(number for part in self._parts for number in part.numbers)

    def numbers_by_graph(self) -> list[tuple[int | float, ...]]:
        return [part.numbers for part in self._parts]

    @property
    def draws(self) -> Sequence[object]:
        return self._parts[0].draws if self._parts else ()

    def begin_step(self) -> Callable[[], None]:
        return self._parts[0].begin_step() if self._parts else lambda: None

    def changed_numbers(self) -> list[str]:
        return [name for part in self._parts for name in part.changed_numbers()]

    def hold(self) -> bool:
        for part in self._parts:  # noqa: SIM110 - it takes half the time of a generator
            if not part.hold():
                return False
        return True

    def broken(self) -> str:
        return next((part.broken() for part in self._parts if not part.hold()), "")


NO_GUARDS = AllGuards()
"""For a graph without Python state beyond the key of its specialization."""
