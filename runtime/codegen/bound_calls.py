"""What a node of a graph may be bound to besides a plain function, for the function that is generated of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Constant:
    """A value that is bound once, instead of being computed by a call in every step."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Meeting:
    """A call in two parts: ``arrive`` takes its arguments and never blocks, ``leave`` waits for other graphs' calls.

    A generated function that pauses does so between them.

    Args:
        arrive, leave: see above.
        may_end: whether the function returns its output at once if ``leave`` gives False.
        is_timed: whether the time of the call is marked as its own, as that of one that may end the function, and of one whose
            value is used; otherwise it belongs to the call after it.
    """

    def __init__(
        self, arrive: Callable[..., None], leave: Callable[[], Any], *, may_end: bool = False, is_timed: bool = False
    ) -> None:
        self.arrive, self.leave, self.may_end, self.is_timed = arrive, leave, may_end, is_timed or may_end


class Asking:
    """A call before which the function yields what it needs: it goes on when that is there.

    Args:
        call: the function.
        asks: each gives what is yielded, of the call's arguments in these places.
    """

    def __init__(self, call: Callable[..., Any], asks: Sequence[tuple[Callable[..., Any], Sequence[int]]]) -> None:
        self.call, self.asks = call, asks


class _Waits:
    """The type of `WAITS`."""


WAITS = _Waits()
"""What a function yields before a call that waits for other graphs' calls, where it matters to whoever runs it."""
