"""Instruments that write the program after every pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence

from mirrorc.dumps.pass_report import PassReport
from mirrorc.dumps.sinks import Sink, warn_of_lost_dump
from mirrorc.ir.program import Program
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.printing.colors import print_colored

_NOT_IN_NAMES = re.compile(r"[^\w.+-]")  # of files


class DumpFiles(Instrument):
    """Saves the program after every pass, with its text and diff, and writes an index at the end.

    If a sink fails, it is dropped with a warning.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks
        self._rows: list[tuple[str, ...]] = []
        self._last: tuple[Pass, Program] | None = None

    def start(self, program: Program) -> None:
        self._rows, self._last = [], None
        name = _first_name(program)
        saved, why_not = self._save(f"00-{name}.mirror.gz", program)
        self._write(PassReport(name, program), saved, why_not)

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        self._last = (compiler_pass, before)
        report = PassReport(compiler_pass.name, after, before, seconds * 1e3)
        saved = self._save(f"{self._stem(report.name)}.mirror.gz", after)[0] if report.is_changed else ""
        self._write(report, saved)

    def refused(self, program: Program, error: Exception) -> None:
        self._note(_first_name(program), error, is_written=bool(self._rows))

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        is_written = self._last is not None and self._last[0] is compiler_pass and self._last[1] is before
        self._note(compiler_pass.name, error, is_written)

    def finish(self, program: Program) -> None:
        self._write_index()

    def _note(self, name: str, error: Exception, is_written: bool) -> None:
        row = self._rows.pop() if is_written else (self._stem(name), "", "", "", "", "")
        reason = str(error).partition("\n\n")[0]  # what follows shows the program
        remarks = "<br>".join(filter(None, [row[4], _cell(reason)]))
        self._rows.append((f"{row[0]}, failed: {type(error).__name__}", *row[1:4], remarks, row[5]))
        self._write_index()

    def _stem(self, name: str) -> str:
        return f"{len(self._rows):02d}-{_NOT_IN_NAMES.sub('_', name)}"

    def _save(self, name: str, program: Program) -> tuple[str, str]:
        try:
            is_saved = [sink.save(name, program) for sink in self.sinks]
        except Exception as error:  # noqa: BLE001 - a broken program may raise anything; the verifier reports it
            return "", f"the program cannot be saved: {error}"
        return name if any(is_saved) else "", ""

    def _write(self, report: PassReport, saved: str = "", why_not: str = "") -> None:
        name = self._stem(report.name)
        self._put(f"{name}.txt", report.text())
        files = f"[text]({name}.txt)"
        diff = report.diff()
        if diff:
            self._put(f"{name}.diff", diff)
            files += f" [diff]({name}.diff)"
        files += f" [program]({saved})" if saved else ""
        time = f"{report.milliseconds:.1f}" if report.milliseconds is not None else ""
        counts = report.counts() if report.is_changed else "as before"
        remarks = "<br>".join(map(_cell, (*report.remarks, *filter(None, [why_not]))))
        self._rows.append((name, report.after.stage.name, time, _cell(counts), remarks, files))

    def _write_index(self) -> None:
        head = ["| pass | stage | ms | nodes | remarks | files |", "|---|---|---|---|---|---|"]
        self._put("index.md", "\n".join([*head, *(f"| {' | '.join(row)} |" for row in self._rows)]) + "\n")

    def _put(self, name: str, text: str) -> None:
        for sink in self.sinks:
            try:
                sink.write(name, text)
            except OSError as error:
                self.sinks = [other for other in self.sinks if other is not sink]
                warn_of_lost_dump(error)


def _first_name(program: Program) -> str:
    """Passes may begin with an edited or saved program."""
    return "given" if program.passes else "capture"


def _cell(text: str) -> str:
    return "<br>".join(text.replace("|", "\\|").replace("<", "\\<").splitlines())


class PrintAfter(Instrument):
    """Prints the program on standard error after the named passes (None for all), in color on a terminal."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.names = names

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        if self.names is None or compiler_pass.name in self.names:
            print_colored(PassReport(compiler_pass.name, after, before, seconds * 1e3).text(), sys.stderr)
