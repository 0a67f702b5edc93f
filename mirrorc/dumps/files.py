"""Instruments that write the program after every pass, and the effect of a pass in numbers, remarks and as a diff."""

from __future__ import annotations

import difflib
import re
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from mirrorc.dumps.sinks import Sink, warn_of_lost_dump
from mirrorc.ir.nodes import target_name
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import as_single_line
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.printing.colors import print_colored
from mirrorc.printing.program_text import ProgramPrinter, program_heading, region_to_text

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


_MOST_DIFF_LINES = 4000  # the longest region that is diffed; a longer diff takes long and is not read


@dataclass(frozen=True)
class PassReport:
    """Reports on a completed pass. If its program is too malformed to print or count, the report has the error."""

    name: str
    after: Program
    before: Program | None = None
    milliseconds: float | None = None

    @cached_property
    def is_changed(self) -> bool:
        """True if the printed program differs from the previous one, or either cannot be printed."""
        if self.before is None or self.before.stage is not self.after.stage:
            return True
        if _has_only_other_remarks(self.before, self.after):
            return False
        try:
            return _whole(self._printer_before) != _whole(self._printer) or bool(self._changed_regions)
        except Exception:  # noqa: BLE001 - of the printer, which knows programs that keep the rules
            return True

    @property
    def remarks(self) -> tuple[str, ...]:
        known = Counter(self.before.remarks if self.before is not None else ())
        return tuple(remark.text for remark in (Counter(self.after.remarks) - known).elements())

    def counts(self) -> str:
        try:
            now, then = _count_operations(self.after), _count_operations(self.before)
        except Exception as error:  # noqa: BLE001 - said
            return _failure("cannot be counted", error)
        changes = [f"{now[name] - then[name]:+d} {name}" for name in sorted({*now, *then}) if now[name] != then[name]]
        total, difference = sum(now.values()), sum(now.values()) - sum(then.values())
        if self.before is None:
            return f"{total} nodes"
        return f"{total} nodes ({difference:+d}){': ' + ', '.join(changes) if changes else ''}"

    def text(self) -> str:
        """The heading, counts and remarks, then the changed program, or the reason why it cannot be printed."""
        try:
            heading, program = self._heading_and_program()
        except Exception as error:  # noqa: BLE001 - said
            heading = f"# mirrorc · after {self.name} · stage {self.after.stage.name}"
            program = f"# this program {_failure('cannot be printed', error)}\n"
        remarks = (f"# remark of this pass: {as_single_line(remark)}" for remark in self.remarks)
        return "\n".join([heading, f"# {self.counts()}", *remarks, program])

    def _heading_and_program(self) -> tuple[str, str]:
        if not self.is_changed:
            return program_heading(self.after, self.name, self.milliseconds), "# the program is as before\n"
        regions = self.after.stage in (Stage.OUTLINED, Stage.LOWERED) or bool(self._changed_regions)
        full = self._printer.text(regions=regions, after=self.name, milliseconds=self.milliseconds)
        heading, _, rest = full.partition("\n")
        return heading, rest

    def diff(self) -> str:
        """A unified diff, with changed bodies of regions; empty without changes."""
        if self.before is None or not self.is_changed:
            return ""
        try:
            return self._diff()
        except Exception as error:  # noqa: BLE001 - said
            return f"# no diff: a program {_failure('cannot be printed', error)}\n"

    def _diff(self) -> str:
        lines = _unified("program", *(p.text().partition("\n")[2] for p in (self._printer_before, self._printer)))
        for name, old, new in self._changed_regions:
            if max(old.count("\n"), new.count("\n")) > _MOST_DIFF_LINES:
                lines.append(f"region {name} has changed; it is too long to show how")
            else:
                lines += _unified(f"region {name}", old, new)
        return "\n".join(lines) + "\n"

    @cached_property
    def _printer(self) -> ProgramPrinter:
        return ProgramPrinter(self.after)

    @cached_property
    def _printer_before(self) -> ProgramPrinter:
        assert self.before is not None, "asked only after a pass"
        return ProgramPrinter(self.before)

    @cached_property
    def _changed_regions(self) -> list[tuple[str, str, str]]:
        if self.before is None or not self.before.regions:
            return []
        changed = []
        for name in dict.fromkeys([*self.before.regions, *self.after.regions]):
            old, new = self.before.regions.get(name), self.after.regions.get(name)
            if old is not new:
                texts = [region_to_text(r) if r is not None else "" for r in (old, new)]
                changed += [(name, *texts)] if texts[0] != texts[1] else []
        return changed  # type: ignore[return-value]


def _has_only_other_remarks(before: Program, after: Program) -> bool:
    """Compares by identity, which needs no printing."""
    names = (field.name for field in fields(Program) if field.name != "remarks")
    return all(getattr(before, name) is getattr(after, name) for name in names)


def _whole(printer: ProgramPrinter) -> str:
    return printer.text(slots=True, remarks=False).partition("\n")[2]


def _failure(title: str, error: Exception) -> str:
    return as_single_line(f"{title}: {type(error).__name__}: {error}")


def _unified(title: str, old: str, new: str) -> list[str]:
    names = (f"{title} before", f"{title} after")
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="", n=2))


def _count_operations(program: Program | None) -> Counter[str]:
    counts: Counter[str] = Counter()
    if program is None:
        return counts
    for graph in [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]:
        targets = Counter((node.op, node.target) for node in graph.nodes if node.op not in ("placeholder", "output"))
        for (op, target), number in targets.items():
            counts["call_region" if op == "call_module" else target_name(target)] += number
    return counts
