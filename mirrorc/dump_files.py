"""Writes the program after every pass to a file of its own, for whoever debugs a pass."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mirrorc.dump import program_to_text
from mirrorc.pass_manager import Instrument, Pass
from mirrorc.program import Program, Stage

_numbers: defaultdict[Path, Iterator[int]] = defaultdict(itertools.count)


def next_program_directory(directory: Path) -> Path:
    """A folder for the next program of this process: ``program-0``, ``program-1`` and so on, over all steps."""
    return directory / f"program-{next(_numbers[directory.absolute()])}"


class DumpFiles(Instrument):
    """Writes the program after every pass to a file of its own.

    Args:
        directory: where; made if it is not there. Each program of a step gets a folder of its own in it.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._number = 0

    def start(self, program: Program) -> None:
        """Writes the captured program."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write("capture", program, None)

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Writes the program that a pass gave."""
        self._write(compiler_pass.name, after, seconds * 1e3)

    def _write(self, name: str, program: Program, milliseconds: float | None) -> None:
        regions = program.stage in (Stage.OUTLINED, Stage.LOWERED)
        text = program_to_text(program, regions=regions, after=name, milliseconds=milliseconds)
        (self.directory / f"{self._number:02d}-{name}.txt").write_text(text, encoding="utf-8")
        self._number += 1
