"""Events that tell when a GPU's queued work is done; on CPUs there is nothing to wait for."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch


def record_event(device: torch.device) -> Any:
    """Records an event after the work on a GPU's current stream; None on the CPU, where work is done when a call returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_device(device: torch.device, timeout_seconds: float) -> bool:
    """Waits until a GPU has done all its queued work; at once for a CPU, or for a GPU that has failed.

    A kernel may wait for another GPU for ever, and torch's wait for a GPU has no bound: a thread waits in the caller's place.

    Returns:
        Whether the work was done in time.
    """
    if device.type != "cuda":
        return True
    waiting = threading.Thread(target=_synchronize, args=(device,), name=f"mirrorc waits for {device}", daemon=True)
    waiting.start()
    waiting.join(timeout_seconds)
    return not waiting.is_alive()


def _synchronize(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # the next use of the GPU raises it again
        torch.cuda.synchronize(device)


def wait_event(event: Any, device: torch.device | None = None) -> None:
    """Lets a GPU's current stream wait for an event of `record_event`; by default, of the current GPU."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
