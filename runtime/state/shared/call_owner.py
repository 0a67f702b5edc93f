"""Who calls a step now, of all steps that have variables in common."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from mirrorc.errors import ExecutionError


class Callers:
    """The calls of steps over common variables, of which one at a time may run; see `mirrorc.calls.call_lock.ExclusiveCalls`.

    Attributes:
        now: the thread whose call runs and that call's owner, under the key "now"; one dict for all these steps.
    """

    def __init__(self) -> None:
        self.now: dict[str, tuple[int, object]] = {}
        _callers.add(self)

    def join(self, others: Sequence[Callers]) -> None:
        """Makes the calls of some steps, and those that run one after the other with them, run one after the other.

        Args:
            others: those that are to be one with this one.

        Raises:
            ExecutionError: calls of several of them run now.
        """
        apart = {id(one.now): one.now for one in (self, *others)}.values()
        running = [calls for calls in apart if calls]
        if len(running) > 1:
            raise ExecutionError(
                "another step over some of the same parameters is running in another thread: steps run one after the other; "
                "call them from one thread, or guard them with a lock"
            )
        kept = running[0] if running else self.now
        for one in list(_callers):
            if any(one.now is calls for calls in apart):
                one.now = kept


_callers: weakref.WeakSet[Callers] = weakref.WeakSet()
