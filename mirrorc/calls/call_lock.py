"""Lets one call of a step run at a time, in the process that has made the step, until the step is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from mirrorc.errors import ExecutionError
from mirrorc.runtime.devices.thread_pool import is_thread_of_device
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.state.shared.call_owner import Callers

_T = TypeVar("_T")
_LONGEST_CLOSING_SECONDS = 5.0


class ExclusiveCalls:
    """The calls of a step, of which one at a time may run; nor may calls of another step over the same variables.

    Args:
        guard: handles Ctrl-C during a call.
        callers: says whose call runs now, an `ExclusiveCalls` of one of those steps; they have it in common.

    Attributes:
        is_closed: whether the step is closed.
    """

    def __init__(self, guard: InterruptGuard, callers: Callers) -> None:
        self._guard = guard
        self._pid = os.getpid()
        self._callers = callers
        self._has_ended = threading.Event()  # whether the last call has ended, if it has found the step closed
        self.is_closed = False

    def run(self, function: Callable[[], _T], end_threads: Callable[[], None]) -> _T:
        """Calls a function while no other call of the step runs, and with Ctrl-C in the hands of the guard.

        An interrupt may come between any two calls of Python. So taking and giving back are one operation each, within the
        ``try``, and what is in the ``finally`` is done with interrupts kept.

        Args:
            function: what is called.
            end_threads: called at its end if the step was closed meanwhile.

        Raises:
            ExecutionError: another call runs, the step is closed, or this is another process.
        """
        if os.getpid() != self._pid:
            raise ExecutionError(
                "the step was compiled in the parent of this forked process and its threads live there: compile it here, in "
                "the child, or start the process with the 'spawn' method"
            )
        guard, own, callers = self._guard, (threading.get_ident(), self), self._callers.now
        try:
            running = callers.setdefault("now", own)
            if running is not own:
                raise ExecutionError(self._why_not(running))
            self.check_open()
            guard.begin()
            return function()
        finally:
            if callers.get("now") is own:
                guard.is_ending = True
                del callers["now"]
                if self.is_closed:
                    end_threads()
                    self._has_ended.set()
                guard.end()

    def _why_not(self, running: tuple[int, object]) -> str:
        """Why no call may begin beside the one that runs."""
        which = "the step" if running[1] is self else "another step over the same parameters"
        if is_thread_of_device() or running[0] == threading.get_ident():
            return (
                f"{which} is running, and calls this one, in a hook or a method of the optimizer perhaps, where parameters are "
                "between two steps: call step, evaluate or accumulate in the loop, when the step has returned"
            )
        return (
            f"{which} is running in another thread: one step changes all parameters, so steps run one after the other; call it "
            "from one thread, or guard it with a lock"
        )

    @property
    def is_any_running(self) -> bool:
        """Whether a call runs, of this step or of another one over the same variables."""
        return "now" in self._callers.now

    def check_open(self) -> None:
        """Raises `ExecutionError` if the step is closed."""
        if self.is_closed:
            raise ExecutionError("the step is closed: its threads have ended; make a new one with mirrorc.compile()")

    def close(self, interrupt: Callable[[], None], end_threads: Callable[[], None]) -> None:
        """Lets no further call begin. A call that runs in another thread is waited for, at most 5 seconds.

        Args:
            interrupt: stops a call that runs in another thread.
            end_threads: called if no call runs then; one that still does calls it when it ends.
        """
        self.is_closed = True
        running = self._callers.now.get("now")
        if running is not None and running[1] is self and running[0] != threading.get_ident():
            interrupt()
            self._has_ended.wait(_LONGEST_CLOSING_SECONDS)
        if not self._is_running():
            end_threads()

    def _is_running(self) -> bool:
        running = self._callers.now.get("now")
        return running is not None and running[1] is self
