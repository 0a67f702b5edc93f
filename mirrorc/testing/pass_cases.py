"""Tests passes by texts: a file has a program, the passes to run on it, and directives that check the result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mirrorc.errors import MirrorcError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.passes import PASSES
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_text import parse_passes
from mirrorc.serialization import parse
from mirrorc.testing.file_check import check
from mirrorc.verifier.verifier import Verify

_CHECK = re.compile(r"\s*# CHECK\b")


class _Directive(NamedTuple):
    number: int  # of its line
    value: str


def check_case(path: Path, *, renews: bool = False) -> None:
    """Runs the passes of a file on its program, verifies it before and after each pass, and checks the result.

    The file is a program's complete text. Comments below its two heading lines are directives::

        # RUN: plan-buckets,outline-regions      as in ``mirrorc opt --passes``; nothing behind the colon only verifies
        # CHECK: b0: f32[16] = pack(             and all others of `check`, on the complete text without ``at(...)`` lines
        # PRINT: short                           on ``to_text(slots=True, sources=False)`` instead
        # ERROR: must come after 'plan-buckets'  instead of CHECK: a pass or the verifier fails, and says so
        # UPDATE: @mirrored                      the CHECK lines are made: those functions line by line, or ``all``

    Args:
        renews: generate the CHECK lines again.

    Raises:
        AssertionError: a directive fails.
        ValueError: the file has no program, or wrong directives.
        MirrorcError: a pass or the verifier fails, without an ERROR directive.
    """
    __tracebackhide__ = True
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    runs, errors, updates = (_directives(lines, name) for name in ("RUN", "ERROR", "UPDATE"))
    # At the same line as in the file, so that failures name its lines:
    checks = [line if _CHECK.match(line) else "" for line in lines]
    if len(runs) != 1 or (errors and any(checks)):
        raise ValueError(f"MC7201: {path} needs one line '# RUN: PASSES', and lines of either '# CHECK:' or '# ERROR:'")
    pipeline = parse_passes(runs[0].value, PASSES)
    try:
        result = run_passes(parse(text, str(path)), pipeline, [Verify()])
    except (MirrorcError, ValueError) as error:
        if not errors:
            raise
        _check_error(error, errors)
        return
    if errors:
        raise AssertionError(f"nothing failed, and line {errors[0].number} says: {errors[0].value}")
    printed = _printed(result, _directives(lines, "PRINT"))
    if renews and updates:
        path.write_text("\n".join(_renewed(lines, updates[0], printed)), encoding="utf-8")
    else:
        check(printed, "\n".join(checks))


def _directives(lines: Sequence[str], name: str) -> list[_Directive]:
    start = f"# {name}:"
    numbered = enumerate(map(str.strip, lines), 1)
    return [_Directive(number, line[len(start) :].strip()) for number, line in numbered if line.startswith(start)]


def _check_error(error: Exception, expected: Sequence[_Directive]) -> None:
    text = " ".join(str(error).split())
    for number, value in expected:
        if " ".join(value.split()) not in text:
            raise AssertionError(f"the error does not say what line {number} does, {value!r}:\n\n{error}") from error


def _printed(program: Program, forms: Sequence[_Directive]) -> str:
    if not forms:
        lines = program.to_text(complete=True).split("\n")
        return "\n".join(line for line in lines if not line.startswith("    at("))
    if forms[0].value != "short":
        raise ValueError(
            f"MC7201: line {forms[0].number} is '# PRINT: {forms[0].value}': there is only '# PRINT: short'"
        )
    return program.to_text(slots=True, sources=False)


def _renewed(lines: Sequence[str], update: _Directive, printed: str) -> list[str]:
    start = "" if update.value == "all" else update.value
    functions = [function for function in printed.strip().split("\n\n")[1:] if function.startswith(start)]
    if not functions:
        raise problem(
            ValueError,
            f"MC7201: line {update.number} is '# UPDATE: {update.value}', with which no function begins",
            fix="write all, or @mirrored, @device or @region",
        )
    made: list[str] = []
    for function in functions:
        first, *rest = function.split("\n")
        made += [f"# CHECK: {first}", *(f"# CHECK-NEXT: {line}" for line in rest)]
    before, after = lines[: update.number], lines[update.number :]
    return [*_without_checks(before), *made, *_without_checks(after)]


def _without_checks(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not _CHECK.match(line)]
