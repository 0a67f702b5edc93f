"""Sinks for dumps: torch's structured trace, or a folder for each program of each process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from mirrorc.ir.program import Program
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import is_structured_trace_on, trace_artifact

try:
    import fcntl
except ImportError:  # on Windows: processes that run at the same time need directories of their own there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_OURS = re.compile(r"\d\d+-.+\.(txt|diff|mirror\.gz)|index\.md")
# The byte of the lock file that is locked while folders are chosen; the bytes after it are for the programs.
_CHOOSING = 0


class Sink:
    """A destination of dumps. A file replaces an earlier one of the same name."""

    def write(self, name: str, text: str) -> None:
        raise NotImplementedError

    def save(self, name: str, program: Program) -> bool:
        """Returns False if the sink accepts only texts."""
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


class DumpFolder:
    """The folder of one program in a directory of dumps.

    At its first use of a directory, a process removes the files of earlier runs. Its programs get ``program-0``,
    ``program-1`` and so on. Folders of other running processes stay.
    """

    def __init__(self, directory: Path) -> None:
        directory = directory.resolve()
        with _taking:
            opened = _opened.get(directory)
            if opened is None or not opened.is_there():
                opened = _opened[directory] = _Directory(directory)
            self.path = opened.take()
        logger.info("what passes do to a program is written to %s", self.path)

    def file(self, name: str) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path / name


class _Directory:
    """The lock file stays open, and the folders stay locked, until this process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count()
        self._lock_file = path / "program-0" / ".lock"
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        self._locks = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        with self._choosing():
            for folder in path.glob("program-*"):
                number = folder.name.removeprefix("program-")
                if number.isdecimal() and self._lock(int(number)):
                    _empty(folder)
                    self._unlock(int(number))

    def is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._locks), self._lock_file.stat())
        return False

    def take(self) -> Path:
        """Locks, empties and returns the next folder that is not locked by another process."""
        with self._choosing():
            folder = self.path / f"program-{next(filter(self._lock, self._numbers))}"
            _empty(folder)  # since this process opened the directory, another one may have written here and ended
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextlib.contextmanager
    def _choosing(self) -> Iterator[None]:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, _CHOOSING)
        try:
            yield
        finally:
            self._unlock(_CHOOSING - 1)

    def _lock(self, number: int) -> bool:
        if fcntl is not None:
            try:
                fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _CHOOSING + 1 + number)
            except (BlockingIOError, PermissionError):
                return False
            except OSError:
                logger.debug("there are no locks in %s", self.path, exc_info=True)
        return True

    def _unlock(self, number: int) -> None:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _CHOOSING + 1 + number)


def _empty(folder: Path) -> None:
    for path in folder.glob("*"):
        if _OURS.fullmatch(path.name):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


_taking = threading.Lock()
_opened: dict[Path, _Directory] = {}
