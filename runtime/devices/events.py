"""The current GPU, and events, which order its streams; no-ops on CPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch


def made_current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def record_event(device: torch.device) -> Any:
    """An event on a GPU's current stream; None on the CPU, where calls are synchronous."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_device(device: torch.device, timeout_seconds: float) -> bool:
    """Waits for a GPU's queued work. Returns False after a timeout.

    Another thread waits, because a kernel may wait for another GPU forever, and torch's wait has no timeout.
    """
    if device.type != "cuda":
        return True
    return _returns_in_time(lambda: torch.cuda.synchronize(device), timeout_seconds, f"mirrorc waits for {device}")


def has_happened(event: Any, timeout_seconds: float) -> bool:
    return _returns_in_time(event.synchronize, timeout_seconds, "mirrorc waits for an event")


def _returns_in_time(wait: Callable[[], object], timeout_seconds: float, name: str) -> bool:
    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the next use of the GPU raises it again
            wait()

    waiting = threading.Thread(target=run, name=name, daemon=True)
    waiting.start()
    waiting.join(timeout_seconds)
    return not waiting.is_alive()


def wait_event(event: Any, device: torch.device | None = None) -> None:
    """Makes a GPU's current stream wait for an event; a no-op for None."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)


def reserve_for(tensor: torch.Tensor, stream: Any) -> None:
    """Keeps the memory of a freed GPU tensor from reuse until a stream has done its queued work."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


def reserve_for_caller(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        reserve_for(tensor, torch.cuda.current_stream(tensor.device))
