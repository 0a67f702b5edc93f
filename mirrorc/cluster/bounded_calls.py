"""Calls of torch's stores that end in a bounded time, whatever the other side does, and that Ctrl-C can cut short."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def in_bounded_time(function: Callable[[], _T], seconds: float) -> _T:
    """Calls a function in a thread of its own, and returns or raises what it does.

    torch waits without a bound, and deaf to signals, for a store that is connected and does not answer.

    Raises:
        TimeoutError: it has not ended in time. Its thread is left behind, and ends with the process at the latest.
    """
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the function was called for
            results.put((None, error))

    threading.Thread(target=run, name="mirrorc store", daemon=True).start()
    try:
        result, error = results.get(timeout=min(seconds, threading.TIMEOUT_MAX))
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result
