"""Completes what must not stop half-way, whatever interrupts it."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_TRIES = (*[False] * 9, True)  # whether it is the last one


def completed(function: Callable[[], _T]) -> _T:
    """The result of a function that may be repeated from any point. If it is interrupted or fails, it is repeated.

    An interruption is raised when the function has succeeded. A failure that repeating has cured, such as short memory, is
    not raised; one that nothing cures is.
    """
    interruption: BaseException | None = None
    for is_last in _TRIES:
        try:
            result = function()
            break
        except BaseException as error:
            if is_last:
                raise
            if not isinstance(error, Exception) or is_raised_by_signal(error):
                interruption = interruption or error
    if interruption is not None:
        raise interruption
    return result


def is_raised_by_signal(error: BaseException) -> bool:
    """Whether a Python function that handles a signal has raised an exception, and not what it has interrupted."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {id(code) for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    return any(id(frame.f_code) in codes for frame, _ in traceback.walk_tb(error.__traceback__))
