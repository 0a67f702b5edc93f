"""The running call among all steps with common variables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem


class Callers:
    """Serializes the calls of steps over common variables; see `mirrorc.calls.call_lock.ExclusiveCalls`.

    Attributes:
        now: a dict that all these steps share: thread and owner of the running call, under the key "now".
    """

    def __init__(self) -> None:
        self.now: dict[str, tuple[int, object]] = {}
        _callers.add(self)

    def join(self, others: Sequence[Callers]) -> None:
        """Serializes the calls of several groups of steps. Raises an error if several of them run now."""
        apart = {id(callers.now): callers.now for callers in (self, *others)}.values()
        running = [calls for calls in apart if calls]
        if len(running) > 1:
            raise problem(
                ExecutionError,
                "MC5004: another step or module over some of the same parameters is running in another thread",
                "calls over the same parameters run one after the other",
                ("make all calls from one thread", "with lock: around each call, where lock = threading.Lock()"),
            )
        running_call = running[0] if running else self.now
        for callers in list(_callers):
            if any(callers.now is calls for calls in apart):
                callers.now = running_call


_callers: weakref.WeakSet[Callers] = weakref.WeakSet()
