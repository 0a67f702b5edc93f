"""Makes a GPU the current one for a while."""

from __future__ import annotations

import contextlib

import torch


def made_current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """A context in which a GPU is the current one; it does nothing for a CPU, and for None."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)
