"""Ctrl-C during a step."""

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
    """The C functions behind `signal.getsignal` and `signal.signal`, which take a quarter of the time."""
    try:
        module = importlib.import_module("_signal")
        return module.getsignal, module.signal
    except (ImportError, AttributeError):
        return signal.getsignal, signal.signal


_handler_of, _set_handler = _functions()


class InterruptGuard:
    """The handler of Ctrl-C (SIGINT) while a step runs in the main thread; no effect in other threads.

    Until the commit, the user's handler is called at once, and usually raises KeyboardInterrupt. After the commit, the
    call is deferred to the end of the step. If device threads run, an exception of the handler first stops the threads.

    The guard also restores torch's settings, because an exception at the exit of ``torch.no_grad()`` leaves gradients
    off.

    Attributes:
        is_ending: signals are deferred until `end`, which must follow.
        raised: the exception of the user's handler while device threads ran.
    """

    def __init__(self) -> None:
        self.commit: CommitPoint | None = None
        self.raised: BaseException | None = None
        self._stop: Callable[[], None] | None = None
        self._users: Handler | None = None
        self._installed: Handler | None = None
        self.is_ending = False
        self._is_holding = False
        self._held_since: float | None = None
        self._settings: tuple[bool, int] | None = None

    def begin(self) -> None:
        self.commit = self.raised = self._stop = self._users = self._installed = self._held_since = None
        self.is_ending = self._is_holding = False
        self._settings = (torch.is_grad_enabled(), torch.get_num_threads())
        if threading.current_thread() is not threading.main_thread():
            return
        users = _handler_of(signal.SIGINT)
        if callable(users):
            self._users, self._installed = users, self._handle
            _set_handler(signal.SIGINT, self._installed)

    def end(self) -> None:
        """Restores the user's handler, and calls it if a signal was deferred; idempotent."""
        settings, self._settings = self._settings, None
        if settings is not None:
            has_gradients, num_threads = settings
            if torch.is_grad_enabled() is not has_gradients:
                torch.set_grad_enabled(has_gradients)
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
        installed = self._installed
        if installed is None:
            return
        replaced = _set_handler(signal.SIGINT, self._users)
        if replaced is not installed:  # the user has set another handler during the step
            _set_handler(signal.SIGINT, replaced)
        users, self._users, self._installed = self._users, None, None
        held_since, self._held_since = self._held_since, None
        if held_since is not None and users is not None:
            users(signal.SIGINT, None)

    def hold(self) -> None:
        """Defers signals until `let_go`, for calls that swallow exceptions of the handler."""
        self._is_holding = True

    def let_go(self) -> None:
        """Ends `hold`. The user's handler may raise an exception here for a deferred signal."""
        self._is_holding = False
        if self._held_since is not None and self._users is not None and not self.is_ending:
            self._held_since = None
            self._users(signal.SIGINT, None)

    def stop_by(self, stop: Callable[[], None] | None) -> None:
        self._stop = stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        users = self._users
        assert users is not None, "it is set while the handler is"
        is_binding = self.commit is not None and self.commit.is_binding
        if is_binding or self.is_ending or self._is_holding:
            if self._held_since is None:
                self._held_since = time.monotonic()
            elif time.monotonic() - self._held_since > _LONGEST_SECONDS:
                users(number, frame)
        elif self._stop is None or self.raised is not None:
            users(number, frame)
        else:
            try:
                users(number, frame)
            except BaseException as error:  # noqa: BLE001 - raised when the threads have ended
                self.raised = error
                self._stop()
