"""Selection of the current GPU."""

from __future__ import annotations

import contextlib

import torch


def made_current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)
