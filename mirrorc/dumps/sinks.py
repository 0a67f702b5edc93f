"""Sinks for dumps: a folder, or torch's structured trace."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

from mirrorc.dumps.folders import DumpFolder
from mirrorc.ir.program import Program
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import is_structured_trace_on, trace_artifact


class Sink:
    """A destination of dumps. A file replaces an earlier one of the same name."""

    def write(self, name: str, text: str) -> None:
        raise NotImplementedError

    def save(self, name: str, program: Program) -> bool:
        """Saves a program. Returns False if the sink accepts only texts."""
        return False


class FolderSink(Sink):
    def __init__(self, directory: Path) -> None:
        self.folder = DumpFolder(directory)

    def write(self, name: str, text: str) -> None:
        self.folder.file(name).write_text(text, encoding="utf-8")

    def save(self, name: str, program: Program) -> bool:
        program.save(self.folder.file(name))
        return True


class TraceSink(Sink):
    _numbers = itertools.count()

    def __init__(self) -> None:
        self.prefix = f"mirrorc_program-{next(self._numbers)}"

    def write(self, name: str, text: str) -> None:
        trace_artifact(f"{self.prefix}_{name}", text)


def dump_sinks(directory: Path | None) -> list[Sink]:
    """The sinks for the next program: a folder in ``directory``, if any, and torch's structured trace, if enabled
    (TORCH_TRACE).

    Warns if the folder cannot be written.
    """
    sinks: list[Sink] = []
    if directory is not None:
        try:
            sinks.append(FolderSink(directory))
        except OSError as error:
            warn_of_lost_dump(error)
    return [*sinks, TraceSink()] if is_structured_trace_on() else sinks


def warn_of_lost_dump(error: OSError) -> None:
    """A failed dump is no reason to end a training run."""
    warnings.warn(
        message(
            "MC7103: a dump of the program cannot be written",
            str(error),
            "make room for it, or name another directory (dump=, MIRRORC_DUMP)",
            now="training goes on without it",
        ),
        stacklevel=users_stack_level(),
    )
