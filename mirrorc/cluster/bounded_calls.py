"""Timeouts; calls of torch's stores with one, which Ctrl-C can interrupt."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

_T = TypeVar("_T")
_SECONDS_BETWEEN_LOOKS = 0.05


def seconds_of(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    return float(max(0, min(timeout, sys.float_info.max)))  # a larger int is no float


def in_bounded_time(function: Callable[[], _T], seconds: float, is_over: Callable[[], bool] | None = None) -> _T:
    """Runs a function in a thread, because torch's waits for a store have no bound; the thread outlives the wait.

    Raises TimeoutError without a result in time, or as soon as ``is_over``, which it polls, returns True.
    """
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            results.put((None, error))

    threading.Thread(target=run, name="mirrorc store", daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        look = left if is_over is None else min(left, _SECONDS_BETWEEN_LOOKS)
        try:
            # looks once more after the deadline: this process may have been stopped, and have the answer now
            result, error = results.get(timeout=min(max(look, _SECONDS_BETWEEN_LOOKS), threading.TIMEOUT_MAX))
            break
        except queue.Empty:
            if is_over is not None and is_over():
                raise TimeoutError("another worker has failed meanwhile") from None
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result
