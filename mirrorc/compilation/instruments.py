"""Instruments of a compilation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from mirrorc.dumps.files import DumpFiles, PrintAfter
from mirrorc.dumps.sinks import dump_sinks
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.pipeline.reproducer import Reproducer
from mirrorc.verifier.verifier import Verify


def instruments_for(
    passes: Sequence[Pass], dump: Path | None, print_after: Collection[str] | Literal["all"], *, reproduces: bool = True
) -> list[Instrument]:
    """Dumps and prints come before the verifier, so that they show a broken program. ``reproduces`` writes a reproducer
    of a failing pass, into a temporary folder if ``dump`` is None.
    """
    sinks = dump_sinks(dump)
    instruments: list[Instrument] = [DumpFiles(sinks)] if sinks else []
    if print_after:
        instruments.append(PrintAfter(None if print_after == "all" else frozenset(print_after)))
    return [*instruments, Verify(), *([Reproducer(passes, dump)] if reproduces else [])]
