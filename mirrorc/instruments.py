"""The instruments that look on while a step's program is compiled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from mirrorc.dumps.files import DumpFiles
from mirrorc.dumps.print_after import PrintAfter
from mirrorc.dumps.sinks import dump_sinks
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.pipeline.reproducer import Reproducer
from mirrorc.verifier.verifier import Verify


def instruments_for(
    passes: Sequence[Pass], dump: Path | None, print_after: Collection[str], print_after_all: bool
) -> list[Instrument]:
    """Dumps and prints come before the verifier: a program that breaks a rule is worth a look.

    Args:
        passes: the pipeline.
        dump: where to write dumps and reproducers; None for none, and a temporary folder for reproducers.
        print_after: names of passes after which the program is printed.
        print_after_all: print it after each.
    """
    sinks = dump_sinks(dump)
    found: list[Instrument] = [DumpFiles(sinks)] if sinks else []
    if print_after or print_after_all:
        found.append(PrintAfter(None if print_after_all else frozenset(print_after)))
    return [*found, Verify(), Reproducer(passes, dump)]
