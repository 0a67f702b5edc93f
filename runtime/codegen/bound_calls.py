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
        may_end: True to return the function's output early if ``leave`` returns False.
        is_timed: True for a time mark of its own; otherwise its time belongs to the next call.
    """

    def __init__(
        self, arrive: Callable[..., None], leave: Callable[[], Any], *, may_end: bool = False, is_timed: bool = False
    ) -> None:
        self.arrive, self.leave, self.may_end, self.is_timed = arrive, leave, may_end, is_timed or may_end


class Asking:
    """A call whose function first yields requests, and continues once they are met.

    Args:
        asks: pairs of a function and positions; the function makes a request from the call's arguments there.
    """

    def __init__(self, call: Callable[..., Any], asks: Sequence[tuple[Callable[..., Any], Sequence[int]]]) -> None:
        self.call, self.asks = call, asks


class _Waits:
    pass


WAITS = _Waits()
"""Yielded before a call that waits for other graphs' calls."""
