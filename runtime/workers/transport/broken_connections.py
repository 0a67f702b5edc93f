"""Ends what waits for a worker that is gone, where its own connection does not tell of it."""

from __future__ import annotations

import threading
import time

from mirrorc.runtime.workers.transport.lane import Lane

_SECONDS_BETWEEN_LOOKS = 0.5


def cut_when_broken(deaf: Lane, told: Lane) -> None:
    """Cuts a lane when another one to the same workers breaks; returns at once.

    A collective of NCCL waits for ever for a worker whose process has ended; a connection of gloo is closed then.

    Args:
        deaf: the lane that is cut.
        told: the lane over gloo. When it is closed, nobody looks any more.
    """
    threading.Thread(target=_watch, args=(deaf, told), name="mirrorc watches connections", daemon=True).start()


def _watch(deaf: Lane, told: Lane) -> None:
    while not told.is_closed:
        if told.is_broken:
            deaf.cut()
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)
