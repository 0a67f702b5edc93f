"""Shows the progress of a long compilation: a line on a terminal, else one line of the log or standard error."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import IO, Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from mirrorc.capture.call.recompile_reasons import FIRST_CALL
from mirrorc.ir.program import Program
from mirrorc.pipeline.protocol import Instrument, Pass

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""Shorter compilations show no progress on a terminal or in the log."""

PATIENCE_ELSEWHERE_SECONDS = 10.0
"""Shorter compilations show no progress in other places, because a line stays there."""

_SECONDS_BETWEEN_LOOKS = 0.1


class Progress(Instrument):
    """A thread that shows the progress; it polls `is_over` ten times a second.

    `is_over` ends the thread by itself, because an interrupt may come between any two Python calls.
    """

    def __init__(self, subject: str, changes: str, *, is_shown: bool) -> None:
        self.is_over = False
        self._subject, self._changes = subject, changes
        self._phase, self._num_done, self._num_all = "begins", 0, 0
        self._began = time.monotonic()
        self._ended = threading.Event()
        is_heard = is_shown and (logger.isEnabledFor(logging.INFO) or free_terminal() is not None or not _on_terminal())
        self._thread = threading.Thread(target=self._say, name="mirrorc progress", daemon=True) if is_heard else None

    def begin(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def enter(self, phase: str, num_all: int = 0) -> None:
        """``num_all`` is the number of steps in the phase; 0 if unknown."""
        self._phase, self._num_done, self._num_all = phase, 0, num_all

    def advance(self) -> None:
        self._num_done += 1

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        self.advance()

    def end(self) -> None:
        self.is_over = True
        self._ended.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _say(self) -> None:
        if not self._lasts(PATIENCE_SECONDS):
            return
        try:
            terminal = free_terminal()
            if terminal is not None:
                self._show(Console(file=terminal))
            elif logger.isEnabledFor(logging.INFO):
                logger.info("%s, and goes on", self._line())
            elif self._lasts(PATIENCE_ELSEWHERE_SECONDS) and not _on_terminal():
                sys.stderr.write(f"mirrorc: {self._notice()}\n")
        except Exception as error:
            logger.debug("progress is not shown", exc_info=error)

    def _lasts(self, seconds: float) -> bool:
        while time.monotonic() - self._began < seconds:
            if self._ended.wait(_SECONDS_BETWEEN_LOOKS) or self.is_over:
                return False
        return True

    def _show(self, console: Console) -> None:
        with Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as live:
            while not self.is_over:
                live.update(Text(self._line(), no_wrap=True, overflow="ellipsis"), refresh=True)
                self._ended.wait(_SECONDS_BETWEEN_LOOKS)

    def _line(self) -> str:
        counted = f", {self._num_done} of {self._num_all}" if self._num_all else ""
        seconds = time.monotonic() - self._began
        return f"compiling {self._subject}: {self._phase}{counted}, {seconds:.0f} s ({self._changes})"

    def _notice(self) -> str:
        why = (
            f"{FIRST_CALL} compiles" if self._changes == FIRST_CALL else f"a call compiles that is new: {self._changes}"
        )
        return f"compiling {self._subject}, {time.monotonic() - self._began:.0f} s so far; {why}"


def free_terminal() -> IO[str] | None:
    """Standard error, if it is a terminal without a live line of rich or tqdm; else None."""
    stream: Any = sys.stderr
    if (
        isinstance(stream, FileProxy) or isinstance(sys.stdout, FileProxy) or _has_bars()
    ):  # rich puts these there meanwhile
        return None
    try:
        is_plain = stream is not None and stream.isatty() and not Console(file=stream).is_dumb_terminal
    except (AttributeError, OSError, ValueError):  # a stand-in that is no stream, or a closed one
        return None
    return stream if is_plain else None


def _on_terminal() -> bool:
    try:
        return sys.stderr is None or sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # as above
        return True


def _has_bars() -> bool:
    module: Any = sys.modules.get("tqdm.std")
    kinds = [module.tqdm] if hasattr(module, "tqdm") else []
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(len(getattr(kind, "_instances", ())) > 0 for kind in kinds)
