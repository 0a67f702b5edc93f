"""Compares what `step.memory()` tells with what is measured: bytes by kind, of all devices together.

    python benchmarks/memory.py [--workloads mlp-64 gpt-8 ...] [--backend inductor] [--devices 2]
    python benchmarks/memory.py --bounds 100% 50% 25% least [--workloads deep-1024 gpt-8 resnet-16]

Prints a Markdown table: told / measured, in MiB, and the ratio of both. Activations are the sum of the devices' peaks, gradients
the pages of buckets that are written. See `measured_memory` for how it is measured; on Linux only.

With ``--bounds``, the activations of steps with ``Memory(activations=)`` instead: what is allowed, told and measured on the
device that takes most, in MiB, and the median time of a step, of steps of all bounds in turn. "least" is the least bound.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from measured_memory import MeasuredMemory, measure
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import WORKLOADS, Workload

import mirrorc
from mirrorc.errors import PassError
from mirrorc.runtime.memory.report import MemoryReport

_TIMED_STEPS = 15
_MORE_WORK = re.compile(r"which is (\S+)% more work")
KINDS = ("parameters", "gradients", "optimizer_state", "buffers")


class Deep(nn.Module):
    """24 blocks of two products, width 256 and 1024, with dropout and LayerNorm, each in a checkpoint or none."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))
            for _ in range(24)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.head(x)


def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 256), torch.randint(10, (n,))


DEEP = {
    name: Workload(name, partial(Deep, checkpoints=name.endswith("checkpoints")), F.cross_entropy, _vectors, 1024)
    for name in ("deep-1024", "deep-1024-checkpoints")
}
"""One deep model with checkpoints of its activations, and without."""


def compared(
    workload: Workload, backend: str, num_devices: int, bound: int | str | None = None
) -> tuple[mirrorc.Step, MemoryReport, MeasuredMemory]:
    """The step, the report before the first one, and what was measured in those after it."""
    reports = []
    x, y = workload.make_batch(workload.per_replica * num_devices)

    def make_step() -> mirrorc.Step:
        torch.manual_seed(0)
        model = workload.make_model()
        devices = [f"cpu:{i}" for i in range(num_devices)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = mirrorc.compile(
            model,
            devices,
            optimizer=optimizer,
            loss_fn=workload.loss_fn,
            memory=mirrorc.Memory(activations=bound),
            compiler=mirrorc.Compiler(backend=backend, disable=["reserve-memory"] if bound is not None else []),
        )
        step.prepare(x, target=y)
        reports.append(step.memory())
        return step

    step, measured = measure(make_step, x, target=y)
    return step, reports[0], measured


def least_bound(workload: Workload, backend: str, num_devices: int) -> int:
    """The least bytes of a device to which activations can be brought, as an error says that allows none."""
    try:
        step, _, _ = compared(workload, backend, num_devices, 1)
    except PassError as error:
        return _bytes_of_least(error)
    step.close()
    return 1


def _bytes_of_least(error: PassError) -> int:
    found = re.search(r"\((\d+) bytes\)", str(error))
    assert found is not None, error
    return int(found[1])


def bounded_rows(workload: Workload, backend: str, num_devices: int, bounds: Sequence[str]) -> Iterator[str]:
    """The rows of the table of bounds."""
    x, y = workload.make_batch(workload.per_replica * num_devices)
    steps, cells = [], []
    for name in bounds:
        bound = least_bound(workload, backend, num_devices) if name == "least" else name
        try:
            step, told, measured = compared(workload, backend, num_devices, bound)
        except PassError as error:
            yield f"| {workload.name} | {name} | refused: {_bytes_of_least(error) / 2**20:.1f} are the least | - | - | - |"
            continue
        steps.append(step)
        most = max(device.own.within_step for device in told.devices)
        work = next((found[1] for one in step.program.remarks if (found := _MORE_WORK.search(one.text))), "0.0")
        cells.append(
            f"{workload.name} | {name} | {most / 2**20:.1f} / {max(measured.activations) / 2**20:.1f} | {work}%"
        )
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_TIMED_STEPS):
        for step, own in zip(steps, times, strict=True):
            began = time.perf_counter()
            step(x, target=y)
            own.append(1e3 * (time.perf_counter() - began))
    for step, cell, own in zip(steps, cells, times, strict=True):
        step.close()
        yield f"| {cell} | {statistics.median(own):.1f} | {statistics.median(own) / statistics.median(times[0]):.2f} |"


def row(name: str, told: MemoryReport, measured: MeasuredMemory) -> str:
    """A row of the table."""
    pairs = [(getattr(told, kind) or 0, getattr(measured, kind)) for kind in KINDS]
    pairs += [(told.within_step, sum(measured.activations)), (told.total, measured.total)]
    cells = [f"{one / 2**20:.1f} / {other / 2**20:.1f}" if one or other else "-" for one, other in pairs]
    ratios = [told.within_step / sum(measured.activations), told.total / measured.total]
    return f"| {name} | {' | '.join(cells)} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |"


def main() -> None:
    """Compares what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = {**WORKLOADS, **DEEP}
    names = [name for name in workloads if name != "tiny"]  # its memory is that of Python's objects
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--bounds", nargs="+", default=[])
    options = parser.parse_args()
    torch.set_num_threads(options.devices)
    if options.bounds:
        print("| workload | bound | told / measured, MiB | more work | step, ms | ratio |")
        print("|---" * 6 + "|")
        for name in options.workloads:
            for line in bounded_rows(workloads[name], options.backend, options.devices, options.bounds):
                print(line, flush=True)
        return
    kinds = [kind.replace("_", " ") for kind in (*KINDS, "activations", "total")]
    print(f"| workload | {' | '.join(kinds)} | ratio of activations | ratio of totals |")
    print("|---" * (len(kinds) + 3) + "|")
    for name in options.workloads:
        step, told, measured = compared(workloads[name], options.backend, options.devices)
        step.close()
        print(row(name, told, measured), flush=True)


if __name__ == "__main__":
    main()
