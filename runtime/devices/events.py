"""Events of GPUs, which say when queued work is done; nothing to wait for on CPUs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def record_event(device: torch.device) -> Any:
    """Marks what is queued on the current stream of a GPU; None on the CPU, where work is done when a call returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_device(device: torch.device) -> None:
    """Returns when a GPU has done all that it was given; at once for a CPU, or for a GPU that is broken."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # it fails again wherever it is used next
            torch.cuda.synchronize(device)


def wait_event(event: Any, device: torch.device | None = None) -> None:
    """Lets the current stream of a GPU, of the current one by default, wait for an event of `record_event`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
