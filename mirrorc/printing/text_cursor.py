"""Goes through the lines of a printed program, and refuses lines that do not have its form."""

from __future__ import annotations

import re
from typing import NoReturn

from mirrorc.printing.folding import unfolded

_SHOWN = 300  # the most characters of a line that are quoted
_ANEW = "print it anew with program.to_text()"


class TextCursor:
    """The lines of a text, unfolded, taken one after the other."""

    def __init__(self, text: str) -> None:
        self._lines = unfolded(text.removesuffix("\n").split("\n"))
        self._taken = 0

    @property
    def number(self) -> int:
        """The number of the line that was taken last; the first line is 1; 0 if no line was taken."""
        return self._lines[self._taken - 1][0] if self._taken else 0

    @property
    def is_at_end(self) -> bool:
        """Whether every line was taken."""
        return self._taken == len(self._lines)

    @property
    def next(self) -> str:
        """The line that will be taken next; empty at the end."""
        return "" if self.is_at_end else self._lines[self._taken][1]

    def take(self) -> str:
        """The next line.

        Raises:
            ValueError: there is none.
        """
        if self.is_at_end:
            raise ValueError(
                f"the printed program is cut off: line {self.number}, {self._lines[-1][1][:_SHOWN]!r}, is its last, where a "
                f"function or region must end with 'return ...'; {_ANEW}"
            )
        self._taken += 1
        return self._lines[self._taken - 1][1]

    def fail(self, expected: str) -> NoReturn:
        """Refuses the line that was taken last.

        Raises:
            ValueError: says which line, what it is, and what was expected there.
        """
        raise ValueError(
            f"this is no printed program: line {self.number} is {self._lines[self._taken - 1][1][:_SHOWN]!r}, where this was "
            f"expected: {expected}; the whole form is in the docstring of mirrorc.printing.program_text, {_ANEW}"
        )

    def expect(self, holds: bool, expected: str) -> None:
        """Refuses the line that was taken last unless ``holds``; raises as `fail` does."""
        if not holds:
            self.fail(expected)

    def match(self, pattern: re.Pattern[str], text: str, expected: str) -> re.Match[str]:
        """Matches a whole text with a pattern; raises as `fail` does if it does not match."""
        match = pattern.fullmatch(text)
        if match is None:
            self.fail(expected)
        return match
