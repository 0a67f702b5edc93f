"""Selection of the current GPU."""

from __future__ import annotations

import contextlib

import torch


def made_current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """A context in which a GPU is current; a no-op for a CPU and for None."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)
