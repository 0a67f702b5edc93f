"""Kinds of calls in a generated function other than plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Constant:
    """A node's value that is bound once, not computed in every step."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TwoPartCall:
    """A call in two parts: ``arrive`` takes the arguments and never blocks; ``leave`` waits for other graphs' calls.

    A generated function with pauses yields between the parts.

    Args:
        may_end: return the function's output early if ``leave`` returns False.
    """

    def __init__(self, arrive: Callable[..., None], leave: Callable[[], Any], *, may_end: bool = False) -> None:
        self.arrive, self.leave, self.may_end = arrive, leave, may_end


class Asking:
    """A call with requests. The generated function first yields the requests; its caller resumes it once they are met.

    Args:
        asks: pairs of a function that makes a request, and the positions of its arguments among the call's.
    """

    def __init__(self, call: Callable[..., Any], asks: Sequence[tuple[Callable[..., Any], Sequence[int]]]) -> None:
        self.call, self.asks = call, asks


class _Waits:
    pass


WAITS = _Waits()
"""Yielded before a call that waits for other graphs' calls."""
