"""Which Python numbers change from step to step, so that they become inputs of programs, and which cannot."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)


class ChangingNumbers:
    """The numbers that a step has seen change, by the expressions that read them.

    A number is a constant of the first program that reads it. When its second value comes, it becomes an input of the programs
    that are captured from then on, unless it is used where only a number can stand; then each value has a program of its own, as
    each string has.

    Args:
        can_be_inputs: whether there are any inputs; if not, all numbers are constants.

    Attributes:
        can_be_drawn: whether numbers that forward draws at random may be inputs; they are never constants.
    """

    def __init__(self, *, can_be_inputs: bool = True) -> None:
        self._can_be_inputs = self.can_be_drawn = can_be_inputs
        self._names: set[str] = set()
        self._given_up: dict[str, str] = {}

    @property
    def inputs(self) -> frozenset[str]:
        """The expressions that read numbers which are to be inputs."""
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
        """Notes that what these expressions read has changed."""
        self._names.update(names)

    def give_up(self, names: Collection[str], why: str, words: Sequence[str] = ()) -> None:
        """Notes that these numbers can be no inputs; ``words`` are what users call them."""
        logger.info("%s: constant in each program, because %s", ", ".join(sorted(names)), why)
        for name in names:
            self._given_up.setdefault(name, f"{' and '.join(words)}: {why}" if words else why)

    @property
    def reasons(self) -> list[str]:
        """Why some numbers stay constants, in words."""
        return list(dict.fromkeys(self._given_up.values()))
