"""Explains the beginning of a step, until the devices' functions begin."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mirrorc.ir.program import Program
from mirrorc.messages.wording import counted
from mirrorc.runtime.profiling.figures import DeviceTimes

_LARGE = 0.1  # of the step, from where it is explained


def start_of(program: Program, devices: Sequence[DeviceTimes], step_ms: float, is_interleaved: bool = False) -> str:
    """What happens until the devices' functions begin, and which device is last; empty if it takes little."""
    last = max(devices, key=lambda device: device.started_ms)
    if last.started_ms < _LARGE * step_ms:
        return ""
    if is_interleaved:
        return "the devices take turns in the caller's thread, and each begins with its first turn"
    on_cpus = [device for device in program.devices if device.torch_device.type == "cpu"]
    has_copies = len(on_cpus) < len(program.devices)
    text = "the caller wakes the devices' threads"
    text += ", and the batch is copied to the devices" if has_copies else ""
    text += f"; a thread begins when it gets a core and Python's lock. {last.device} is the last, at {last.started_ms:.3f} ms"
    cores = _num_cores()
    if len(on_cpus) > cores:
        text += f": {len(on_cpus)} devices share {counted(cores, 'core')}"
    return text


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
