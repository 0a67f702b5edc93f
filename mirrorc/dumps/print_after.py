"""Prints programs in the terminal during compilation."""

from __future__ import annotations

import sys
from collections.abc import Collection

from mirrorc.dumps.pass_report import PassReport
from mirrorc.ir.program import Program
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.printing.colors import print_colored


class PrintAfter(Instrument):
    """Prints the program after some passes (None for all) on standard error, in color if that is a terminal."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.names = names

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        if self.names is None or compiler_pass.name in self.names:
            print_colored(PassReport(compiler_pass.name, after, before, seconds * 1e3).text(), sys.stderr)
