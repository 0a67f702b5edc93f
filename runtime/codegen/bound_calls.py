"""Bindings of graph nodes other than plain functions, for generated functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Constant:
    """A value bound once, in place of a call in every step."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TwoPartCall:
    """A call in two parts: ``arrive`` takes its arguments and never blocks, ``leave`` waits for other graphs' calls.

    A generated function with pauses yields between them.

    Args:
        may_end: early return of the function's output if ``leave`` returns False.
        is_timed: a separate time mark for the call; otherwise its time belongs to the next call.
    """

    def __init__(
        self, arrive: Callable[..., None], leave: Callable[[], Any], *, may_end: bool = False, is_timed: bool = False
    ) -> None:
        self.arrive, self.leave, self.may_end, self.is_timed = arrive, leave, may_end, is_timed or may_end


class Asking:
    """A call with a request: the function yields its needs, and continues once they are met.

    Args:
        asks: each makes a yielded value from the call's arguments at these positions.
    """

    def __init__(self, call: Callable[..., Any], asks: Sequence[tuple[Callable[..., Any], Sequence[int]]]) -> None:
        self.call, self.asks = call, asks


class _Waits:
    pass


WAITS = _Waits()
"""A yield before a call that waits for other graphs' calls, for schedulers."""
