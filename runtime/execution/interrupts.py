"""Ctrl-C during a step: it stops the step as long as that is possible, and waits for the step's end otherwise."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from mirrorc.runtime.execution.commit.commit_point import CommitPoint

_LONGEST_SECONDS = 5.0  # if a step does not end for so long after Ctrl-C, the next Ctrl-C is passed on
Handler = Callable[[int, FrameType | None], Any]


def _functions() -> tuple[Callable[[int], Any], Callable[[int, Any], Any]]:
    """The functions that `signal.getsignal` and `signal.signal` wrap: they take a quarter of the time, where there are such."""
    try:
        module = importlib.import_module("_signal")
        return module.getsignal, module.signal
    except (ImportError, AttributeError):
        return signal.getsignal, signal.signal


_handler_of, _set_handler = _functions()


class InterruptGuard:
    """The handler of Ctrl-C (SIGINT) while a step runs in the main thread.

    Until the step is committed, the user's handler is called, which usually raises KeyboardInterrupt. From then on the signal is
    kept, and the user's handler is called when the step has ended. While devices' threads run, what the user's handler raises is
    kept, too: it stops the threads, and is raised when they have ended.

    Only the main thread gets signals; in another one there is nothing to handle. Likewise if no Python function handles the
    signal.

    An exception that comes while ``torch.no_grad()`` ends would leave the caller without gradients, so what a step sets for a
    while in the caller's thread is put back here, too.

    Attributes:
        commit: decides on the step; None until the step has one.
        is_ending: keeps signals from now on; must be followed by `end`.
        raised: what the user's handler has raised while devices' threads ran.
    """

    def __init__(self) -> None:
        self.commit: CommitPoint | None = None
        self.raised: BaseException | None = None
        self._stop: Callable[[], None] | None = None
        self._users: Handler | None = None
        self._own: Handler | None = None
        self.is_ending = False
        self._is_holding = False
        self._kept_at: float | None = None
        self._settings: tuple[bool, int] | None = None

    def begin(self) -> None:
        """Begins to handle the signal."""
        self.commit = self.raised = self._stop = self._users = self._own = self._kept_at = None
        self.is_ending = self._is_holding = False
        self._settings = (torch.is_grad_enabled(), torch.get_num_threads())
        if threading.current_thread() is not threading.main_thread():
            return
        users = _handler_of(signal.SIGINT)
        if callable(users):
            self._users, self._own = users, self._handle
            _set_handler(signal.SIGINT, self._own)

    def end(self) -> None:
        """Gives the signal back to the user's handler, and calls that if the signal came meanwhile. May be repeated."""
        self._put_settings_back()
        own = self._own
        if own is None:
            return
        replaced = _set_handler(signal.SIGINT, self._users)
        if replaced is not own:  # the user has set another handler during the step
            _set_handler(signal.SIGINT, replaced)
        users, self._users, self._own = self._users, None, None
        kept, self._kept_at = self._kept_at, None
        if kept is not None and users is not None:
            users(signal.SIGINT, None)

    def _put_settings_back(self) -> None:
        settings, self._settings = self._settings, None
        if settings is None:
            return
        has_gradients, num_threads = settings
        if torch.is_grad_enabled() is not has_gradients:
            torch.set_grad_enabled(has_gradients)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def hold(self) -> None:
        """Keeps the signal until `let_go`: for calls that swallow what the handler raises."""
        self._is_holding = True

    def let_go(self) -> None:
        """Ends `hold`: what the user's handler raises for a signal that came meanwhile is raised here."""
        self._is_holding = False
        if self._kept_at is not None and self._users is not None and not self.is_ending:
            self._kept_at = None
            self._users(signal.SIGINT, None)

    def stop_by(self, stop: Callable[[], None] | None) -> None:
        """Says what stops devices' threads; None when they have ended."""
        self._stop = stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        users = self._users
        assert users is not None, "it is set while the handler is"
        is_binding = self.commit is not None and self.commit.is_binding
        if is_binding or self.is_ending or self._is_holding:
            if self._kept_at is None:
                self._kept_at = time.monotonic()
            elif time.monotonic() - self._kept_at > _LONGEST_SECONDS:
                users(number, frame)
        elif self._stop is None or self.raised is not None:
            users(number, frame)
        else:
            try:
                users(number, frame)
            except BaseException as error:  # noqa: BLE001 - raised when the threads have ended
                self.raised = error
                self._stop()
