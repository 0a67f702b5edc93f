"""Checks a program's text with `torch.testing.FileCheck`, by directives such as ``CHECK: all_reduce(bucket=0``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch.testing import FileCheck

from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.step import Step

_LINE = re.compile(r"(?:#\s*)?(?P<directive>CHECK\b.*)")
_DIRECTIVE = re.compile(r"(?P<kind>CHECK(?:-[A-Z]+)*)(?:-(?P<count>\d+))?:(?P<sought>.*)")
_KINDS = ("CHECK", "CHECK-SAME", "CHECK-NEXT", "CHECK-NOT", "CHECK-DAG", "CHECK-COUNT", "CHECK-COUNT-EXACTLY")
_KNOWN = "CHECK:, CHECK-SAME:, CHECK-NEXT:, CHECK-NOT:, CHECK-DAG:, CHECK-COUNT-2:, CHECK-COUNT-EXACTLY-2:"
_SHOWN = 40  # the most lines of the program that a failure shows


@dataclass(frozen=True)
class _Directive:
    line: str
    number: int
    kind: str
    sought: str
    count: int = 1

    @property
    def is_not(self) -> bool:
        return self.kind == "CHECK-NOT"


def check(program: Program | Step | str, directives: str) -> None:
    """Checks that a program's text contains certain texts, in order.

    Each line is a directive of `torch.testing.FileCheck`, maybe indented or after ``#``; other lines that begin with
    ``#`` are comments. The text to find extends to the end of the line. Several blanks count as one, because printed
    columns are padded::

        CHECK: b0_pending: pending f32[64] = reduce_scatter(bucket=0
        # later in the same line:
        CHECK-SAME: link=shared-memory
        # in the line after that:
        CHECK-NEXT: bwd_1(
        # not before what the next directive finds; without one, not in the rest:
        CHECK-NOT: wait(
        # at least two of them; with CHECK-COUNT-EXACTLY-2 no third before what the next directive finds:
        CHECK-COUNT-2: update(
        # in any order:
        CHECK-DAG: new(norm.running_mean)
        CHECK-DAG: return loss

    Args:
        program: a text; a program, printed by ``program.to_text(slots=True, sources=False)``; or a step with such a
            program.

    Raises:
        AssertionError: a directive fails; shows it, and the text in which it was searched.
        ValueError: there is no directive, or a line is neither a directive nor a comment.
        TypeError: ``program`` is not a program, step or text, or the directives are not a string.
    """
    __tracebackhide__ = True
    text = _text_of(program)
    parsed = _parse(directives)
    lines = text.splitlines()
    plain = [" ".join(line.split()) for line in lines]
    if _failure(parsed, plain):
        raise AssertionError(_explain(parsed, plain, lines))


def _text_of(program: Program | Step | str) -> str:
    if isinstance(program, Step):
        program = program.program
    if isinstance(program, Program):
        return program.to_text(slots=True, sources=False)
    if isinstance(program, str):
        return program
    raise TypeError(
        f"MC7201: a {type(program).__name__} cannot be checked: give a Program, a Step, or a text such as program.to_text()"
    )


def _parse(directives: str) -> list[_Directive]:
    if not isinstance(directives, str):
        raise TypeError(
            f"MC7201: directives is a {type(directives).__name__}: give a string of lines such as 'CHECK: update('"
        )
    parsed: list[_Directive] = []
    for number, line in enumerate(directives.splitlines(), 1):
        match = _LINE.fullmatch(line.strip())
        if match:
            parsed += _parse_directive(match["directive"], number)
        elif line.strip() and not line.strip().startswith("#"):
            raise problem(
                ValueError,
                f"MC7201: line {number} of the check, {line.strip()!r}, is no directive",
                fix=(f"begin it with one of {_KNOWN}", "begin it with #, for a comment"),
            )
    if not parsed:
        raise ValueError(
            f"MC7201: the check has no directive, so nothing could fail: write lines that begin with {_KNOWN}"
        )
    return parsed


def _parse_directive(line: str, number: int) -> list[_Directive]:
    match = _DIRECTIVE.fullmatch(line)
    kind = match["kind"] if match else ""
    takes_count = kind.startswith("CHECK-COUNT")
    if match is None or kind not in _KINDS or takes_count != bool(match["count"]) or match["count"] == "0":
        raise ValueError(
            f"MC7201: line {number} of the check, {line!r}, is no directive that is known: there are {_KNOWN}"
        )
    sought = " ".join(match["sought"].split())
    if not sought:
        raise ValueError(
            f"MC7201: line {number} of the check, {line!r}, seeks nothing: write what is sought after the colon"
        )
    if not takes_count:
        return [_Directive(line, number, kind, sought)]
    no_more = [_Directive(line, number, "CHECK-NOT", sought)] if kind == "CHECK-COUNT-EXACTLY" else []
    return [_Directive(line, number, "CHECK-COUNT", sought, int(match["count"])), *no_more]


def _failure(directives: Sequence[_Directive], lines: Sequence[str]) -> str:
    if not directives:
        return ""
    file_check = FileCheck()
    for directive in directives:
        if directive.kind == "CHECK-COUNT":
            file_check.check_count(directive.sought, directive.count)
        else:
            method = directive.kind.lower().replace("-", "_")
            getattr(file_check, method)(directive.sought)
    try:
        file_check.run("\n".join(lines) + "\n")
    except (RuntimeError, UnicodeDecodeError) as error:  # a UnicodeDecodeError if its message cuts a character in two
        return str(error) or type(error).__name__
    return ""


def _explain(directives: Sequence[_Directive], plain: Sequence[str], lines: Sequence[str]) -> str:
    culprit, before = _culprit(directives, plain)
    start = _lines_needed(before, plain)
    head = f"the program is not as line {culprit.number} of the check says, {culprit.line!r}: {_reason(culprit)}"
    positive = [directive for directive in before if not directive.is_not]
    where = (
        f"sought from line {start}, up to which {positive[-1].line!r} was found"
        if positive
        else "sought from the beginning"
    )
    first = max(0, start - 1)
    shown = [
        f"{'>' if culprit.is_not and culprit.sought in plain[i] else ' '}{i + 1:6} | {lines[i]}".rstrip()
        for i in range(first, min(len(lines), first + _SHOWN))
    ]
    left_out = len(lines) - first - len(shown)
    rest = [f"... and {left_out} more lines"] if left_out else []
    return "\n".join([head, f"{where}:", "", *shown, *rest])


def _reason(culprit: _Directive) -> str:
    if culprit.is_not:
        return f"{culprit.sought!r} is there" + (" once more" if "COUNT" in culprit.line.split(":")[0] else "")
    where = {"CHECK-SAME": " in the rest of the line", "CHECK-NEXT": " in the next line"}.get(culprit.kind, "")
    often = f" {culprit.count} times" if culprit.count > 1 else ""
    return f"{culprit.sought!r} is not there{often}{where}"


def _culprit(directives: Sequence[_Directive], plain: Sequence[str]) -> tuple[_Directive, Sequence[_Directive]]:
    begin = 0
    for end, directive in enumerate(directives, 1):
        following = directives[end].kind if end < len(directives) else ""
        if following and (directive.is_not or directive.kind == following == "CHECK-DAG"):
            continue  # a CHECK-NOT applies up to the next match, and neighboring CHECK-DAGs are matched together
        if _failure(directives[:end], plain):
            break
        begin = end
    before, group = directives[:begin], directives[begin:end]
    sought = [directive for directive in group if not directive.is_not]
    missing = [directive for directive in sought if _failure([*before, directive], plain)]
    forbidden = [d for d in group if d.is_not and _failure([*before, d, *sought], plain)]
    return [*missing, *forbidden, directive][0], before


def _lines_needed(directives: Sequence[_Directive], plain: Sequence[str]) -> int:
    low, high = 0, len(plain)
    while directives and low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _failure(directives, plain[:middle]) else (low, middle)
    return high if directives else 0
