"""Writes reports as HTML, of steps and of saved programs; reads their data back, and compares two."""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mirrorc.comparison.diff import diff_texts
from mirrorc.ir.program import Program, Stage
from mirrorc.printing.printed_values import size_text
from mirrorc.report.picture import picture_of
from mirrorc.report.step_report import StepReport, metrics_of, reported_program, step_report
from mirrorc.runtime.devices.machine import measured_machine
from mirrorc.runtime.profiling.accounting import PARTS
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.prediction import predicted_step
from mirrorc.serialization.literals import TextError, expression
from mirrorc.serialization.program_file import write_whole
from mirrorc.serialization.records import record_of, record_text

_FORMAT = "mirrorc report 3: "
_DATA = re.compile(r'<script type="text/plain" id="data">(.*?)</script>', re.DOTALL)
_MEMORY = ("parameters", "gradients", "optimizer_state", "buffers", "activations", "passing_sums", "reserved", "total")
_STYLES = {
    "forward": "forward",
    "backward": "backward",
    "pack": "pack",
    "launch": "launch",
    "late": "skew: another device is not there yet",
    "idle": "in flight, nothing moves",
    "moving": "transfer: bytes move",
    "filling": "a bucket is filled",
    "commit": "commit",
    "update": "update",
    "write": "write",
    "start": "start",
    "other": "other",
}


def write_report(path: str | os.PathLike[str], report: StepReport, earlier: StepReport | None = None) -> Path:
    """Writes a whole file or none."""
    return write_whole(path, render(report, earlier).encode())


def read_report(path: str | os.PathLike[str]) -> StepReport:
    """Raises ValueError if the file is not a report."""
    match = _DATA.search(Path(path).read_text(encoding="utf-8", errors="replace"))
    try:
        if match is None or not match[1].startswith(_FORMAT):
            raise TextError("it has no data of one")
        report: StepReport = record_of(expression(match[1].removeprefix(_FORMAT)), StepReport, "the report")
    except TextError as error:
        raise ValueError(f"{path} is not a report of step.report() in this version of mirrorc: {error}") from error
    return report


def render(report: StepReport, earlier: StepReport | None = None) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ms": lambda ms: f"{ms:.3f}", "size": _size}
    source = importlib.resources.files("mirrorc.report").joinpath("report.html.j2")
    template = environment.from_string(source.read_text(encoding="utf-8"))
    picture = picture_of(report)
    return template.render(
        report=report,
        data=_FORMAT + record_text(report, StepReport, "the report").replace("<", "\\u003c"),
        picture=picture,
        lines=report.program.text.rstrip("\n").split("\n"),
        bar_of_line=picture.first_bar,
        parts=PARTS,
        styles=_STYLES,
        memory_kinds=_MEMORY,
        earlier=earlier,
        changes=list(changes(earlier.metrics, report.metrics)) if earlier is not None else [],
        difference=diff_texts(earlier.program.text, report.program.text) if earlier is not None else "",
    )


@dataclass(frozen=True)
class Change:
    name: str
    before: str
    now: str
    difference: str


def changes(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[Change]:
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        text = ""
        if old is not None and new is not None and old != new:
            relative = f" ({(new - old) / old:+.1%})" if old else ""
            text = f"{'+' if new > old else '-'}{_figure(name, abs(new - old))}{relative}"
        yield Change(name, _figure(name, old), _figure(name, new), text)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return size_text(round(value))
    return f"{value:.3f}" if name.endswith("_ms") else f"{value:g}"


def _size(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else size_text(num_bytes) if num_bytes else "-"


def report_file(file: Path, output: Path, compare: Path | None = None) -> Path:
    """Writes the report of a saved program or an earlier report."""
    return write_report(output, load_report(file), load_report(compare) if compare is not None else None)


def load_report(path: str | os.PathLike[str]) -> StepReport:
    """A saved report, or a prediction for a saved program."""
    with Path(path).open("rb") as file:
        is_page = file.read(9).lower() == b"<!doctype"
    return read_report(path) if is_page else predicted_report(Program.load(path), {"file": os.fspath(path)})


def predicted_report(program: Program, facts: Mapping[str, str]) -> StepReport:
    """The report of a program that has not run; without times if its step cannot be predicted."""
    if program.stage is Stage.LOWERED and program.trains:
        try:
            step, stands_on = predicted_step(program, measured_machine())
        except ValueError as error:
            facts = {**facts, "not predicted": str(error)}
        else:
            explanation = explain_steps(program, [step])
            return step_report(program, step, explanation, None, facts, metrics_of(explanation), stands_on)
    return StepReport(facts, reported_program(program), "", 0.0, (), (), None, None, None, {})
