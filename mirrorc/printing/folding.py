"""Folds stretches of lines that repeat from bucket to bucket.

One line replaces the repeats of a stretch, and says how bucket and layer numbers increase::

    48 gradients = bwd_1(...)                     # h.30.mlp … h.30.ln_1
    b3: f32[50816] = pack(bucket=3, 48 gradients)
    … b4 … b30: as b3 (the 2 lines above), for h.29 … h.3

Microbatches with the same regions are folded likewise. A stretch is part of one block, such as a bucket's lines in the
table, or several whole blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NUMBERS = re.compile(
    r"(?<![\w.])(?P<before>b|bucket=|bucket )(?P<bucket>\d+)(?![\d.])"
    r"|(?<![\w.])(?P<path>(?:[A-Za-z_]\w*\.)*)(?P<layer>\d+)(?=(?:\.\d+)*\.[A-Za-z_])"
    r"|(?<![\w.])(?P<parts>(?:[A-Za-z_]\w*\.)+)(?P<last>\d+)(?=(?:\.\d+)*(?![\w.]))"
    r"|(?P<of_part>(?:\bindex=|_microbatch_|_microbatch_seed_))(?P<part>\d+)"
    r"|(?<![\w.])(?P<identifier>[A-Za-z]\w*?_)(?P<inner>\d+)(?=_[A-Za-z])"
)
# The beginning of a comment that lists modules, whose names may consist of numbers: ``31.0``.
_MODULES = "# backward of "
_NUMBER_OF_MODULE = re.compile(r"(?<![\w.])(?P<path>(?:[A-Za-z_]\w*\.)*)(?P<layer>\d+)")
_KINDS = (("before", "bucket"), ("of_part", "part"), ("path", "layer"), ("parts", "last"), ("identifier", "inner"))
_MARK = re.compile(
    r"(?:    |# )… .*: as (?:b|bucket |microbatch )\d+ \(the (?:\d+ lines|line) above\)(?:, for \S+ … \S+)?"
)
_OF_MESSAGES = re.compile(r"    .*… messages of \S+, rounds? .* \(\d+ lines\)")
_PARTS = "    … microbatch "
_LONGEST = 24  # the most lines of a stretch
_LEAST_REPEATS = 3  # a stretch with fewer repeats is printed each time


@dataclass(frozen=True)
class _Shape:
    """A line with ``#`` in place of each number, and its numbers. ``label`` precedes the first layer's number."""

    text: str
    buckets: tuple[int, ...]
    layers: tuple[int, ...]
    label: str = ""
    parts: tuple[int, ...] = ()


def folded(lines: Sequence[str], sign: str, begins_block: Callable[[str], bool]) -> list[str]:
    """The lines of a table or function body, with repeats of a stretch replaced by a mark.

    Args:
        sign: the beginning of a mark: ``# … bucket `` in a table, four spaces and ``… b`` in a body.
        begins_block: tests for the first line of a block.
    """
    begins = [*map(begins_block, lines), True]
    shapes = [_shape(line) for line in lines]
    printed: list[str] = []
    i = 0
    while i < len(lines):
        length, repeats = _longest_stretch(shapes, begins, i)
        printed += lines[i : i + length]
        if repeats > 1:
            printed.append(_mark(shapes, i, length, repeats, sign))
            i += length * repeats
        else:
            i += length
    return printed


def is_mark(line: str) -> bool:
    """True for a line that stands for others, here or in `mirrorc.printing.message_folds`."""
    return (_MARK.fullmatch(line) or _OF_MESSAGES.fullmatch(line)) is not None


def _shape(line: str) -> _Shape:
    buckets: list[int] = []
    layers: list[int] = []
    parts: list[int] = []
    labels: list[str] = []

    def take(name: str, before: str, number: int) -> str:
        {"bucket": buckets, "part": parts}.get(name, layers).append(number)
        if name not in ("bucket", "part"):
            labels.append(before)
        return f"{before}#"

    text = _replaced(" ".join(line.split()), take)
    return _Shape(text, tuple(buckets), tuple(layers), labels[0] if labels else "", tuple(parts))


def _replaced(line: str, replacement: Callable[[str, str, int], str]) -> str:
    def replace(match: re.Match[str]) -> str:
        groups = match.groupdict()
        before, name = next((before, name) for before, name in _KINDS if groups.get(name) is not None)
        return replacement(name, groups[before], int(groups[name]))

    text, of, modules = line.partition(_MODULES)
    return _NUMBERS.sub(replace, text) + of + _NUMBER_OF_MODULE.sub(replace, modules)


def _longest_stretch(shapes: Sequence[_Shape], begins: Sequence[bool], start: int) -> tuple[int, int]:
    best, most = (1, 1), 0
    for length in range(1, min(_LONGEST, (len(shapes) - start) // 2) + 1):
        if shapes[start].text != shapes[start + length].text:
            continue
        has_blocks = any(begins[start : start + length])
        if has_blocks and not begins[start]:
            continue
        repeats = _repeats(shapes, start, length)
        if has_blocks and not begins[start + length * repeats]:
            repeats -= 1  # the last block goes on after the stretch
        least = 2 if _is_of_parts(shapes[start : start + length]) and length > 1 else _LEAST_REPEATS
        if repeats >= least and length * (repeats - 1) > most:
            best, most = (length, repeats), length * (repeats - 1)
    return best


def _repeats(shapes: Sequence[_Shape], start: int, length: int) -> int:
    steps, repeats = _steps(shapes, start, length), 1
    if steps is None or not (steps[0] or steps[2]):
        return repeats
    while start + (repeats + 1) * length <= len(shapes):
        if _steps(shapes, start + (repeats - 1) * length, length) != steps:
            break
        repeats += 1
    return repeats


def _steps(shapes: Sequence[_Shape], start: int, length: int) -> tuple[int, int | None, int] | None:
    """The differences of numbers between a stretch and the next one: of buckets, layers and parts."""
    buckets: set[int] = set()
    layers: set[int] = set()
    parts: set[int] = set()
    other = start + length
    for a, b in zip(shapes[start:other], shapes[other : other + length], strict=True):
        if a.text != b.text:
            return None
        buckets.update(y - x for x, y in zip(a.buckets, b.buckets, strict=True))
        layers.update(y - x for x, y in zip(a.layers, b.layers, strict=True))
        parts.update(y - x for x, y in zip(a.parts, b.parts, strict=True))
    if parts:
        return (0, 0, 1) if parts == {1} and buckets <= {0} and layers <= {0} else None
    if len(buckets) != 1 or len(layers) > 1:
        return None
    return buckets.pop(), layers.pop() if layers else None, 0


def _is_of_parts(stretch: Sequence[_Shape]) -> bool:
    return any(shape.parts for shape in stretch)


def _mark(shapes: Sequence[_Shape], start: int, length: int, repeats: int, sign: str) -> str:
    stretch = shapes[start : start + length]
    if _is_of_parts(stretch):
        index = next(shape.parts[-1] for shape in stretch if shape.parts)  # the operation's index= is last
        to = f" … {index + repeats - 1}" if repeats > 2 else ""
        return f"{_PARTS}{index + 1}{to}: as microbatch {index} (the {length} lines above)"
    base = next(shape.buckets[0] for shape in stretch if shape.buckets)
    steps = _steps(shapes, start, length)
    assert steps is not None, "a stretch that repeats"
    unit, second = sign.rpartition("… ")[2], "b" if sign.endswith("b") else ""
    above = "the line above" if length == 1 else f"the {length} lines above"
    every = f", every {_ordinal(abs(steps[0]))}" if abs(steps[0]) > 1 else ""
    text = f"{sign}{base + steps[0]} … {second}{base + (repeats - 1) * steps[0]}{every}: as {unit}{base} ({above})"
    named = next((shape for shape in stretch if shape.layers), None)
    if named is None or not steps[1]:
        return text
    first, last = (named.layers[0] + i * steps[1] for i in (1, repeats - 1))
    return f"{text}, for {named.label}{first} … {named.label}{last}"


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
