"""Completes what must not stop half-way, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_NUM_TRIES = 10


def completed(function: Callable[[], _T]) -> _T:
    """The result of a function that may be repeated from any point. If it is interrupted or fails, it is repeated.

    The first exception is raised when the function has succeeded; likewise if it fails again and again, which is then a fault
    of its own.
    """
    raised: BaseException | None = None
    for _ in range(_NUM_TRIES):
        try:
            result = function()
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = raised or error
    if raised is not None:
        raise raised
    return result
