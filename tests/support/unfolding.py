"""Prints what folding has left out, and the lines of one device."""

import re
from collections.abc import Sequence

from mirrorc.printing import folding

_MARK = re.compile(
    r"(?:    |# )… (?:b|bucket )(?P<first>\d+) … b?(?P<last>\d+)(?:, every \d+(?:st|nd|rd|th))?: as (?:b|bucket )(?P<base>\d+) "
    r"\(the (?:(?P<lines>\d+) lines|line) above\)(?:, for (?P<from>\S+) … (?P<to>\S+))?"
)
_PARTS = "    … microbatch "
_MARK_OF_PARTS = re.compile(
    rf"{_PARTS}(?P<first>\d+)(?: … (?P<last>\d+))?: as microbatch (?P<base>\d+) \(the (?P<lines>\d+) lines above\)"
)


def unfolded(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Inverts `mirrorc.printing.folding.folded`. Each line comes with its number, from 1, in the folded text."""
    lines_before: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        mark, of_parts = _MARK.fullmatch(line), _MARK_OF_PARTS.fullmatch(line)
        if of_parts is not None:
            stretch = [text for _, text in lines_before[-int(of_parts["lines"]) :]]
            steps = range(1, int(of_parts["last"] or of_parts["first"]) - int(of_parts["base"]) + 1)
            lines_before += [(number, _moved(text, 0, 0, step)) for step in steps for text in stretch]
            continue
        if mark is None:
            lines_before.append((number, line))
            continue
        first, last, base = (int(mark[name]) for name in ("first", "last", "base"))
        repeats = (last - first) // (first - base) + 1 if first != base else 0
        begin, end = (_number_at_end(mark[name] or "0") for name in ("from", "to"))
        layer_step = (end - begin) // (repeats - 1) if repeats > 1 else 0
        stretch = [text for _, text in lines_before[-int(mark["lines"] or 1) :]]
        for i in range(1, repeats + 1):
            lines_before += [(number, _moved(text, i * (first - base), i * layer_step)) for text in stretch]
    return lines_before


def _moved(line: str, buckets: int, layers: int, parts: int = 0) -> str:
    steps = {"bucket": buckets, "part": parts}
    return folding._replaced(line, lambda name, before, number: f"{before}{number + steps.get(name, layers)}")


def _number_at_end(name: str) -> int:
    match = re.search(r"\d+$", name)
    return int(match[0]) if match else 0


def body_of(text: str, function: str) -> list[str]:
    """The unfolded lines of a function, without explanations, source lines and comments."""
    lines = [line for _, line in unfolded(text.splitlines())]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"def {function}("))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("    return"))
    body = (line.partition("  # ")[0] for line in lines[start + 1 : end] if not line.startswith("    # "))
    return [" ".join(line.split()) for line in body]  # bucket numbers of two digits shift the columns


def table_of(text: str) -> list[str]:
    """The unfolded lines of the table of buckets."""
    lines = [line for _, line in unfolded(text.splitlines())]
    return [line for line in lines if line.startswith(("# bucket ", "#   "))]
