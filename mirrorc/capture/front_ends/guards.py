"""What a front end says about the Python state that its graph depends on: whether that state is still as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Guards(Protocol):
    """Watches everything that Python read while a graph was traced, and that the key of a specialization lacks.

    The key has the arguments' shapes, strides and dtypes, the plain attributes and hooks of modules, what is trainable, and
    torch's modes (`compilation.specializer`). It lacks the arguments that are strings and numbers: those of a call are put into
    `TrainingCall.plain` before guards are asked. Guards are asked in the caller's thread before every step, so they must be
    cheap: some microseconds.
    """

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The Python numbers that the graph takes, as `hold` has found them."""

    @property
    def draws(self) -> Sequence[object]:
        """What forward and loss draw of Python's random and numpy's in each step, in order; these can be compared."""

    def use_draws(self) -> Callable[[], None]:
        """Leaves the generators as forward leaves them, when it has drawn what `hold` has found; gives what puts them back."""

    def changed_numbers(self) -> list[str]:
        """The expressions that read another number now than the graph has as a constant."""

    def hold(self) -> bool:
        """Whether a trace would still read what it read."""

    def broken(self) -> str:
        """What has changed, in a few words with the line that reads it; for messages, after `hold` was false."""


class AllGuards:
    """The guards of all graphs of a program together."""

    def __init__(self, parts: Sequence[Guards] = ()) -> None:
        self._parts = tuple(parts)

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The Python numbers that all graphs take."""
        return tuple(number for part in self._parts for number in part.numbers)

    def numbers_by_graph(self) -> list[tuple[int | float, ...]]:
        """The Python numbers that each graph takes."""
        return [part.numbers for part in self._parts]

    @property
    def draws(self) -> Sequence[object]:
        """What all graphs draw, which is the same."""
        return self._parts[0].draws if self._parts else ()

    def use_draws(self) -> Callable[[], None]:
        """Leaves the generators as forward leaves them; gives what puts them back."""
        return self._parts[0].use_draws() if self._parts else lambda: None

    def changed_numbers(self) -> list[str]:
        """The expressions that read another number now than some graph has as a constant."""
        return [name for part in self._parts for name in part.changed_numbers()]

    def hold(self) -> bool:
        """Whether all hold."""
        for part in self._parts:  # noqa: SIM110 - it takes half the time of a generator
            if not part.hold():
                return False
        return True

    def broken(self) -> str:
        """What the first says that does not hold."""
        return next((part.broken() for part in self._parts if not part.hold()), "")


NO_GUARDS = AllGuards()
"""For a graph that depends on nothing but the key of its specialization."""
