"""Folds consecutive items of lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_NUMBERED = re.compile(r"(.*?)(\d+)")
_LEAST_SPAN = 3  # shorter ones are listed


def spans(items: Iterable[object]) -> str:
    """``cpu:0 … cpu:3, cpu:6`` for names, ``0 … 3, 6`` for numbers."""
    parts: list[str] = []
    for run in _runs([str(item) for item in items]):
        parts += [f"{run[0]} … {run[-1]}"] if len(run) >= _LEAST_SPAN else run
    return ", ".join(parts)


def range_text(start: int, stop: int) -> str:
    return "none" if start == stop else f"{start}" if stop == start + 1 else f"{start} … {stop - 1}"


def _runs(names: Sequence[str]) -> list[list[str]]:
    runs: list[list[str]] = []
    for before, name in itertools.pairwise([None, *names]):
        if before is not None and name is not None and _follows(before, name):
            runs[-1].append(name)
        elif name is not None:
            runs.append([name])
    return runs


def _follows(before: str, name: str) -> bool:
    first, second = _NUMBERED.fullmatch(before), _NUMBERED.fullmatch(name)
    if first is None or second is None or second[2] != str(int(second[2])):
        return False
    return first[1] == second[1] and int(first[2]) + 1 == int(second[2])
