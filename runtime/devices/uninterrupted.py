"""Completion of critical sections despite interrupts."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_TRIES = (*[False] * 9, True)  # True for the last one


def completed(function: Callable[[], _T]) -> _T:
    """Calls a function until it succeeds, at most ten times; returns its result.

    The function must be idempotent from any point. Interrupts are raised after success, failures only after the last
    call.
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
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {id(code) for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    return any(id(frame.f_code) in codes for frame, _ in traceback.walk_tb(error.__traceback__))
