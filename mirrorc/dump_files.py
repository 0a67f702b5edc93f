"""Writes what every pass did: to files for whoever debugs a pass, and to torch's structured trace."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from mirrorc.colours import print_coloured
from mirrorc.pass_manager import Instrument, Pass
from mirrorc.pass_report import PassReport
from mirrorc.program import Program
from mirrorc.torch_internals import is_structured_trace_on, trace_artifact

Sink = Callable[[str, str], None]
"""Takes a file's name and its text; a later text of one name replaces the earlier."""

_numbers: defaultdict[Path | None, Iterator[int]] = defaultdict(itertools.count)


def dump_sinks(directory: Path | None) -> list[Sink]:
    """Where the next program of this process is to be dumped.

    Args:
        directory: gets a folder for the program, ``program-0``, ``program-1`` and so on over all steps; None for no files.

    Returns:
        A sink for the folder, and one for torch's structured trace where that is on (the variable TORCH_TRACE).
    """
    sinks: list[Sink] = []
    if directory is not None:
        sinks.append(_FolderSink(directory / f"program-{next(_numbers[directory.absolute()])}"))
    if is_structured_trace_on():
        prefix = f"mirrorc_program-{next(_numbers[None])}"
        sinks.append(lambda name, text: trace_artifact(f"{prefix}_{name}", text))
    return sinks


class _FolderSink:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")


class DumpFiles(Instrument):
    """Gives sinks, for every pass, a text and a diff to the pass before, and at the end an index of them.

    The text of a pass names the pass, the stage, the time, the number of nodes and how many of each operation came and went,
    and the pass's remarks; the program follows in full if the pass changed it.

    Args:
        sinks: where to.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks
        self._rows: list[tuple[str, ...]] = []

    def start(self, program: Program) -> None:
        """Writes the captured program."""
        self._rows = []
        self._write(PassReport("capture", program))

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Writes the program that a pass gave, and what it changed."""
        self._write(PassReport(compiler_pass.name, after, before, seconds * 1e3))

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """Notes in the index where compilation ended."""
        reason = f"failed: {type(error).__name__}"
        if self._rows and self._rows[-1][0].endswith(f"-{compiler_pass.name}"):  # refused after it had run
            name, *rest = self._rows.pop()
            self._rows.append((f"{name}, {reason}", *rest))
        else:
            self._rows.append((f"{len(self._rows):02d}-{compiler_pass.name}, {reason}", "", "", "", "", ""))
        self._write_index()

    def finish(self, program: Program) -> None:
        """Writes the index."""
        self._write_index()

    def _write(self, report: PassReport) -> None:
        name = f"{len(self._rows):02d}-{report.name}"
        self._put(f"{name}.txt", report.text())
        diff = report.diff()
        if diff:
            self._put(f"{name}.diff", diff)
        files = f"[text]({name}.txt)" + (f" [diff]({name}.diff)" if diff else "")
        time = f"{report.milliseconds:.1f}" if report.milliseconds is not None else ""
        counts = report.counts() if report.is_changed else "as before"
        self._rows.append((name, report.after.stage.name, time, counts, "<br>".join(report.remarks), files))

    def _write_index(self) -> None:
        head = ["| pass | stage | ms | nodes | remarks | files |", "|---|---|---|---|---|---|"]
        self._put("index.md", "\n".join([*head, *(f"| {' | '.join(row)} |" for row in self._rows)]) + "\n")

    def _put(self, name: str, text: str) -> None:
        for sink in self.sinks:
            sink(name, text)


class PrintAfter(Instrument):
    """Prints the program after some passes, on standard error, in colours if that is a terminal.

    Args:
        names: of the passes; None for all.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.names = names

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Prints the program that a pass gave."""
        if self.names is None or compiler_pass.name in self.names:
            print_coloured(PassReport(compiler_pass.name, after, before, seconds * 1e3).text(), sys.stderr)
