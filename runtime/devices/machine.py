"""Names the properties of a machine on which measured times depend; the names are the same in every run."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
_FIELDS = ("model name", "cpu family", "model", "stepping", "cache size", "CPU implementer", "CPU part")


def device_model(device: torch.device) -> str:
    """The model of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_model()


def processor_model() -> str:
    """The processor's architecture and model, as far as the system tells."""
    try:
        first_core = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    pairs = (line.partition(":") for line in first_core.splitlines())
    told = {name.strip(): value.strip() for name, _, value in pairs}
    return ", ".join([platform.machine(), *(f"{name} {told[name]}" for name in _FIELDS if name in told)])


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
