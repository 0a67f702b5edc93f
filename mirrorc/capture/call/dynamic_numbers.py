"""The Python numbers that change from step to step, which become inputs of programs where they can."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)


class ChangingNumbers:
    """The numbers that a step has seen change, by the expressions that read them.

    A number is a constant of the first program that reads it. From its second value on, it is an input of the programs that are
    captured then. One that is used where only a number can stand has a program for each value, as a string has.

    Args:
        can_be_inputs: if not, all numbers are constants.

    Attributes:
        can_be_drawn: whether numbers that forward draws at random may be inputs; they are never constants.
    """

    def __init__(self, *, can_be_inputs: bool = True) -> None:
        self._can_be_inputs = self.can_be_drawn = can_be_inputs
        self._names: set[str] = set()
        self._given_up: dict[str, str] = {}

    @property
    def inputs(self) -> frozenset[str]:
        """The expressions of the numbers that are to be inputs."""
        return frozenset(self._names - self._given_up.keys()) if self._can_be_inputs else frozenset()

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """A block in which there are no inputs."""
        before, self._can_be_inputs = self._can_be_inputs, False
        try:
            yield
        finally:
            self._can_be_inputs = before

    def add(self, names: Iterable[str]) -> None:
        """Notes that the numbers of these expressions have changed."""
        self._names.update(names)

    def give_up(self, names: Collection[str], why: str, words: Sequence[str] = ()) -> None:
        """Notes that these numbers can be no inputs; ``words`` are the users' names for them."""
        logger.info("%s: constant in each program, because %s", ", ".join(sorted(names)), why)
        for name in names:
            self._given_up.setdefault(name, f"{' and '.join(words)}: {why}" if words else why)

    @property
    def reasons(self) -> list[str]:
        """The reasons why some numbers stay constants."""
        return list(dict.fromkeys(self._given_up.values()))
