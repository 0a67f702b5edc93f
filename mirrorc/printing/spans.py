"""Folds consecutive items of lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(|.*\D)(0|[1-9]\d*)")
_LEAST_SPAN = 3  # shorter ones are listed


def spans(items: Iterable[object]) -> str:
    """``cpu:0 … cpu:3, cpu:6`` for names, ``0 … 3, 6`` for numbers."""
    parts: list[str] = []
    for _, indexed in itertools.groupby(enumerate(map(str, items)), _run_of):
        run = [name for _, name in indexed]
        parts += [f"{run[0]} … {run[-1]}"] if len(run) >= _LEAST_SPAN else run
    return ", ".join(parts)


def _run_of(indexed: tuple[int, str]) -> tuple[object, ...]:
    """Equal for neighbours whose names end in consecutive numbers."""
    index, name = indexed
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]) - index) if match is not None else (index,)


def range_text(start: int, stop: int) -> str:
    return "none" if start == stop else f"{start}" if stop == start + 1 else f"{start} … {stop - 1}"
