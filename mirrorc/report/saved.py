"""Reports from files: earlier reports, and saved programs with predicted steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mirrorc.ir.program import Program, Stage
from mirrorc.report.logged_figures import metrics_of
from mirrorc.report.page import read_report, write_report
from mirrorc.report.step_report import StepReport, reported_program, step_report
from mirrorc.runtime.devices.machine import measured_machine
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.prediction import predicted_step


def report_file(file: Path, output: Path, compare: Path | None = None) -> Path:
    """Writes the report of a saved program or an earlier report.

    Raises:
        ValueError: a file is neither.
    """
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
