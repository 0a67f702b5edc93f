"""Saves a failing pass for another run."""

from __future__ import annotations

import json
import logging
import platform
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mirrorc.errors import MirrorcError
from mirrorc.ir.program import Program
from mirrorc.pipeline.pipeline_text import format_passes
from mirrorc.pipeline.protocol import Instrument, Pass

logger = logging.getLogger(__name__)


class Reproducer(Instrument):
    """Writes a reproducer if a pass fails or breaks a rule, and names it in the error's message.

    A reproducer is a folder with the pass's input program and ``reproducer.json``: the remaining passes with their
    options, the error, and versions. `Reproducer` must be the last instrument, because it counts the passes that no
    instrument has refused.

    Args:
        directory: where the folder is created; None for the system's temporary directory.
    """

    def __init__(self, passes: Sequence[Pass], directory: Path | None) -> None:
        self.passes = passes
        self.directory = directory
        self._num_done = 0

    def start(self, program: Program) -> None:
        self._num_done = 0

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        self._num_done += 1

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """Writes a reproducer for an error of mirrorc. If writing fails, only logs why."""
        if not isinstance(error, MirrorcError):
            return
        try:
            folder = self._folder(compiler_pass)
            before.save(folder / "program.mirror.gz")
            rest, why_not = self._rest(compiler_pass)
            record = {
                "pass": compiler_pass.name,
                "passes": rest,
                **({"not_replayed": why_not} if why_not else {}),
                "pipeline": _described(self.passes),
                "error": f"{type(error).__name__}: {error}",
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            (folder / "reproducer.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except (OSError, ValueError, TypeError) as reason:
            logger.warning("no reproducer was written: %s", reason)
            return
        error.args = (f"{error}\n\n{_remedy(compiler_pass, folder / 'program.mirror.gz', rest, why_not)}",)

    def _rest(self, compiler_pass: Pass) -> tuple[str | None, str]:
        places = [i for i, candidate in enumerate(self.passes) if candidate is compiler_pass]
        place = min(places, key=lambda i: abs(i - self._num_done))  # one pass may be in the pipeline twice
        try:
            failing = format_passes([compiler_pass])
        except ValueError as error:
            return None, str(error)
        try:
            return format_passes(self.passes[place:]), ""
        except ValueError:
            return failing, ""

    def _folder(self, compiler_pass: Pass) -> Path:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.+-]", "_", compiler_pass.name)
        return Path(tempfile.mkdtemp(prefix=f"mirrorc-{name}-", dir=self.directory))


def _described(passes: Sequence[Pass]) -> str:
    try:
        return format_passes(passes)
    except ValueError:
        return ",".join(compiler_pass.name for compiler_pass in passes)


def _remedy(compiler_pass: Pass, program: Path, rest: str | None, why_not: str) -> str:
    if rest is None:
        return (
            f"The command line cannot replay it: {why_not}. What the pass was given is in {program}: give "
            "mirrorc.Program.load() of that to its run()."
        )
    command = shlex.join(["mirrorc", "opt", str(program), "--passes", rest])
    kind = type(compiler_pass)
    if kind.__module__ != "__main__":
        return f"Reproduce it with: {command}"
    return (
        f"Reproduce it with: {command}\nThis imports the script that defines {kind.__qualname__}: put the pass in a module of "
        "its own, or guard what the script does with if __name__ == '__main__'."
    )
