"""Lists and numbers in words; printable text."""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable, Sequence


def listed(items: Iterable[object], most: int = 3) -> str:
    """``a``, ``a and b``, ``a, b and c``, or ``a, b, c and 9 more``."""
    names = [str(item) for item in items]
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 gradient``, ``12 gradients``; ``plural`` if it is not the noun plus s."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def numbered(noun: str, numbers: Sequence[object], most: int = 3) -> str:
    """``bucket 0``, ``buckets 0 and 1``, ``buckets 0 … 4`` for consecutive numbers, or ``buckets 0, 2, 3 and 4 more``."""
    first = numbers[0]
    if isinstance(first, int) and len(numbers) > 2 and list(numbers) == list(range(first, first + len(numbers))):
        return f"{noun}s {numbers[0]} … {numbers[-1]}"
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {listed(numbers, most)}"


def guess(name: object, known: Iterable[str], otherwise: str) -> str:
    """``did you mean 'ring'?``, or ``otherwise`` if no known name is similar."""
    names, text = list(known), str(name)
    close = [each for each in names if each.startswith(text)] or difflib.get_close_matches(text, names, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def notebook_html(summary: str, text: str) -> str:
    """HTML of a summary that opens the text at a click."""
    return f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"


def printable(text: str) -> str:
    r"""Replaces control and invisible characters by ``\x1b`` and the like; line breaks stay."""
    return text if text.isprintable() else "\n".join(map(as_single_line, text.split("\n")))


def as_single_line(text: str) -> str:
    r"""`printable`, with line breaks as ``\n``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
