"""The lock around the calls of a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import message, problem
from mirrorc.runtime.devices.thread_pool import is_thread_of_device
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.state.shared.shared_state import Callers

_T = TypeVar("_T")
_LONGEST_CLOSING_SECONDS = 5.0


class ExclusiveCalls:
    """Runs one call at a time. Steps over the same variables share ``callers``."""

    def __init__(self, guard: InterruptGuard, callers: Callers, *, is_module: bool = False) -> None:
        self._kind, self._maker = ("module", "mirrorc.data_parallel") if is_module else ("step", "mirrorc.compile")
        self._guard = guard
        self._pid = os.getpid()
        self._callers = callers
        self._has_ended = threading.Event()  # set at the end of a call that finds the step closed
        self.is_closed = False

    def run(self, function: Callable[[], _T], end_threads: Callable[[], None]) -> _T:
        """Runs a function with the guard's handler of Ctrl-C; raises ExecutionError if another call is running.

        An interrupt may come between any two Python calls. Acquire and release are therefore one operation each within
        the ``try``, and the ``finally`` defers interrupts.
        """
        if os.getpid() != self._pid:
            raise problem(
                ExecutionError,
                f"MC5009: the {self._kind} was compiled in the parent of this forked process",
                "threads do not survive a fork",
                (
                    f"{self._maker}(...) in the child, after the fork",
                    "torch.multiprocessing.set_start_method('spawn'), before any process starts",
                ),
            )
        guard, owner, callers = self._guard, (threading.get_ident(), self), self._callers.now
        try:
            running = callers.setdefault("now", owner)
            if running is not owner:
                raise ExecutionError(self._refusal(running))
            self.check_open()
            guard.begin()
            return function()
        finally:
            if callers.get("now") is owner:
                guard.is_ending = True
                del callers["now"]
                if self.is_closed:
                    end_threads()
                    self._has_ended.set()
                guard.end()

    def _refusal(self, running: tuple[int, object]) -> str:
        other = f"the {self._kind}" if running[1] is self else "another step or module over the same parameters"
        if is_thread_of_device() or running[0] == threading.get_ident():
            return message(
                f"MC5004: a {self._kind} was called while {other} is running, from within that call",
                "in a hook or a method of the optimizer, parameters are only partly updated",
                "move the call out of the hook or method, into your training loop",
            )
        return message(
            f"MC5004: {other} is running in another thread",
            "calls over the same parameters run one after the other",
            ("make all calls from one thread", "with lock: around each call, where lock = threading.Lock()"),
        )

    @property
    def is_any_running(self) -> bool:
        return "now" in self._callers.now

    def check_open(self) -> None:
        if self.is_closed:
            fix = f"{self._maker}(...), which makes a new one"
            raise problem(ExecutionError, f"MC5003: the {self._kind} is closed: its threads have ended", fix=fix)

    def close(self, interrupt: Callable[[], None], end_threads: Callable[[], None]) -> None:
        """Refuses further calls. Interrupts a call in another thread, and waits up to 5 seconds for its end."""
        self.is_closed = True
        running = self._callers.now.get("now")
        # a call that closes the step itself, in a hook of the optimizer, runs to its end
        is_within = is_thread_of_device() or (running is not None and running[0] == threading.get_ident())
        if running is not None and running[1] is self and not is_within:
            interrupt()
            self._has_ended.wait(_LONGEST_CLOSING_SECONDS)
        if not self._is_running():
            end_threads()

    def _is_running(self) -> bool:
        running = self._callers.now.get("now")
        return running is not None and running[1] is self
