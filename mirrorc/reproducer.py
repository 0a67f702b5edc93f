"""Keeps what is needed to run a failing pass again: the program before it, the passes from there on, versions."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mirrorc.errors import MirrorcError
from mirrorc.pass_manager import Instrument, Pass
from mirrorc.pass_specs import format_passes
from mirrorc.program import Program

logger = logging.getLogger(__name__)


class Reproducer(Instrument):
    """When a pass fails, or gives a program that breaks a rule, writes a reproducer and names it in the error's message.

    The folder holds ``program.json.gz``, the program that the pass was given, and ``reproducer.json``: the failing pass and
    those after it with their options, the whole pipeline, the error, and the versions of torch and Python.

    Args:
        passes: the whole pipeline.
        directory: where the folder is made; a new one among the system's temporary files, if None.
    """

    def __init__(self, passes: Sequence[Pass], directory: Path | None) -> None:
        self.passes = passes
        self.directory = directory

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """Writes the reproducer; if that fails, the error stays as it is and the reason is logged."""
        if not isinstance(error, MirrorcError):
            return
        try:
            folder = self._folder(compiler_pass)
            before.save(folder / "program.json.gz")
            rest = format_passes(self.passes[self.passes.index(compiler_pass) :])
            record = {
                "pass": compiler_pass.name,
                "passes": rest,
                "pipeline": format_passes(self.passes),
                "error": f"{type(error).__name__}: {error}",
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            (folder / "reproducer.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except (OSError, ValueError, TypeError) as reason:
            logger.warning("no reproducer was written: %s", reason)
            return
        command = shlex.join(["mirrorc", "opt", str(folder / "program.json.gz"), "--passes", rest])
        error.args = (f"{error}\n\nReproduce it with: {command}",)

    def _folder(self, compiler_pass: Pass) -> Path:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"mirrorc-{compiler_pass.name}-", dir=self.directory))
