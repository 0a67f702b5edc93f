"""The differing lines of two printed programs. Functions and regions are compared separately, so equal ones cost little."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mirrorc.printing.printed_program import PrintedProgram

_MOST_LINES = 200  # the most lines that are shown
_CONTEXT = 2  # lines that are shown around those that differ
_COMPARED = 3000  # the most lines of a part that are compared: more than are shown
_MEASURED = re.compile(r" · after .+?(?= · stage )| · \d+(?:\.\d+)? ms$")


@dataclass
class _Part:
    """A text's top, a function or a region; ``numbers`` are line numbers of the text."""

    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


def text_changes(old: str, new: str, programs: tuple[PrintedProgram, PrintedProgram]) -> list[str]:
    """A unified diff of two texts, with line numbers; ``programs`` are the texts as read."""
    parts = [_parts(text, program) for text, program in zip((old, new), programs, strict=True)]
    names = list(dict.fromkeys([*parts[0], *parts[1]]))
    pairs = [(parts[0].get(name, _Part()), parts[1].get(name, _Part())) for name in names]
    pairs = [(old_part, new_part) for old_part, new_part in pairs if old_part.lines != new_part.lines]
    if not pairs:
        return []
    shown = ["--- old", "+++ new"]
    for old_part, new_part in pairs:
        if len(shown) < _MOST_LINES:
            shown += _hunks(old_part, new_part)
    num_shown = sum(line.startswith(("-", "+")) for line in shown[2:_MOST_LINES])
    left_out = sum(_num_differing(old_part, new_part) for old_part, new_part in pairs) - num_shown
    if len(shown) > _MOST_LINES or left_out > 0:
        rest = f"{left_out} more lines that differ" if left_out > 0 else "more lines, in another order,"
        shown = [*shown[:_MOST_LINES], f"... and {rest} are left out here"]
    return shown


def _parts(text: str, program: PrintedProgram) -> dict[str, _Part]:
    """Parts of a text by name. The pass, its time, the dump's report and source lines are left out."""
    parts: dict[str, _Part] = {"": _Part()}
    part, above = parts[""], _Part()  # above: lines from an empty line to a function, part of the function
    is_above = False
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if line.startswith(("def ", "region ")):
            name = line.partition("(")[0]
            while name in parts:
                name += "'"
            part = parts[name] = above
        is_above = not line or (is_above and line.startswith("# "))
        if not line:
            above = _Part()
        elif not (1 < number <= 1 + len(program.report)) and not is_source(line):
            into = above if is_above else part
            into.lines.append(line if number > 1 else _MEASURED.sub("", line))
            into.numbers.append(number)
    return parts


def is_source(line: str) -> bool:
    return line.startswith("    # ") and not line.startswith("    # -- ")


def _num_differing(old_part: _Part, new_part: _Part) -> int:
    """Takes linear time; moved lines do not count."""
    counts = [Counter(part.lines) for part in (old_part, new_part)]
    return (counts[0] - counts[1]).total() + (counts[1] - counts[0]).total()


def _hunks(old_part: _Part, new_part: _Part) -> Iterator[str]:
    """Yields only the first hunks of a very long part."""
    limit = min(len(old_part.lines), len(new_part.lines))
    start = next((i for i in range(limit) if old_part.lines[i] != new_part.lines[i]), limit)
    end = next((i for i in range(limit - start) if old_part.lines[-1 - i] != new_part.lines[-1 - i]), limit - start)
    first, after = max(0, start - _CONTEXT), max(0, end - _CONTEXT)
    before, now = (part.lines[first : min(len(part.lines) - after, first + _COMPARED)] for part in (old_part, new_part))
    for group in difflib.SequenceMatcher(None, before, now).get_grouped_opcodes(_CONTEXT):
        spans = (group[0][1], group[-1][2]), (group[0][3], group[-1][4])
        yield f"@@ -{_span(old_part, first, *spans[0])} +{_span(new_part, first, *spans[1])} @@"
        for kind, i, j, k, m in group:
            if kind == "equal":
                yield from (f" {line}" for line in before[i:j])
            else:
                yield from (f"-{line}" for line in before[i:j])
                yield from (f"+{line}" for line in now[k:m])


def _span(part: _Part, first: int, start: int, stop: int) -> str:
    number = (
        part.numbers[first + start] if first + start < len(part.numbers) else part.numbers[-1] if part.numbers else 0
    )
    return f"{number},{stop - start}"
