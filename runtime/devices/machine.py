"""Properties of this machine that affect measured times and the bits of products."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mirrorc.analysis.cost.work import Machine

_CPUINFO = Path("/proc/cpuinfo")
_SETTINGS = ("MKL_", "OMP_", "KMP_", "DNNL_", "ONEDNN_")  # of libraries that multiply, in the environment
_MEASURED_SIZE = 512  # of the matrices whose product is timed
_MOVED_BYTES = 2**25  # that are copied and timed, more than caches hold
_FIELDS = ("model name", "cpu family", "model", "stepping", "cache size", "CPU implementer", "CPU part")


def processor_model() -> str:
    try:
        first_core = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    pairs = (line.partition(":") for line in first_core.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return ", ".join([platform.machine(), *(f"{name} {fields[name]}" for name in _FIELDS if name in fields)])


def product_facts(num_threads: int) -> dict[str, str]:
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    return {
        "processor": processor_model(),
        "PyTorch": torch.__version__,
        "libraries": " ".join(torch.__config__.show().split()),
        "threads of a device": str(num_threads),
        "precision of products": torch.get_float32_matmul_precision(),
        "environment": str(settings),
    }


def seconds_per_multiplication() -> float:
    matrix = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE)
    return _least_seconds(lambda: torch.mm(matrix, matrix)) / _MEASURED_SIZE**3


def seconds_per_moved_byte() -> float:
    source = torch.ones(_MOVED_BYTES, dtype=torch.uint8)
    into = torch.empty_like(source)
    return _least_seconds(lambda: into.copy_(source)) / (2 * _MOVED_BYTES)


def _least_seconds(call: Callable[[], object]) -> float:
    times = []
    with torch.no_grad():
        for _ in range(4):  # the first is slow
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return min(times)


@functools.cache
def measured_machine() -> Machine:
    return Machine(seconds_per_multiplication(), seconds_per_moved_byte())
