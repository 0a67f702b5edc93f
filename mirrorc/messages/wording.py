"""Lists and numbers in words; printable text."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Iterable, Iterator, Sequence


def listed(items: Iterable[object], most: int = 3) -> str:
    """``a``, ``a and b``, ``a, b and c``, or ``a, b, c and 9 more``."""
    names = [str(item) for item in items]
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 gradient``, ``12 gradients``; ``plural`` if it is not the noun with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def numbered(noun: str, numbers: Sequence[object], most: int = 3) -> str:
    """``bucket 0``, ``buckets 0, 1 and 2``."""
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {listed(numbers, most)}"


def in_a_row(names: Sequence[str], least: int = 4) -> str:
    """``cpu:0, cpu:1``, or ``cpu:0 … cpu:7`` for at least so many whose numbers follow each other."""
    parts = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    stems, numbers = {part and part[1] for part in parts}, [int(part[2]) for part in parts if part]
    follows = len(stems) == 1 and len(numbers) == len(names) and numbers == [*range(numbers[0], numbers[-1] + 1)]
    return f"{names[0]} … {names[-1]}" if follows and len(names) >= least else ", ".join(names)


def guess(name: object, known: Iterable[str], otherwise: str) -> str:
    """``did you mean 'ring'?``, or ``otherwise`` if no known name begins with it or is like it."""
    names, text = list(known), str(name)
    close = [each for each in names if each.startswith(text)] or difflib.get_close_matches(text, names, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def capped(sentences: Iterable[str], most: int, rest: str) -> Iterator[str]:
    """The first ``most`` sentences, then ``rest`` with the number left out, such as ``... and {} more remarks``."""
    left_out = 0
    for i, sentence in enumerate(sentences):
        if i < most:
            yield sentence
        else:
            left_out += 1
    if left_out:
        yield rest.format(left_out)


def notebook_html(summary: str, text: str) -> str:
    """HTML of a summary; a click on it opens the text."""
    return f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"


def printable(text: str) -> str:
    r"""Writes control and invisible characters as ``\x1b``; line breaks stay."""
    return text if text.isprintable() else "\n".join(map(as_single_line, text.split("\n")))


def as_single_line(text: str) -> str:
    r"""`printable`, with line breaks as ``\n``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
