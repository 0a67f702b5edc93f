"""Compares what `step.memory()` tells with what is measured: bytes by kind, of all devices together.

    python benchmarks/memory.py [--workloads mlp-64 gpt-8 ...] [--backend inductor] [--devices 2]

Prints a Markdown table: told / measured, in MiB, and the ratio of both. Activations are the sum of the devices' peaks, gradients
the pages of buckets that are written. See `measured_memory` for how it is measured; on Linux only.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from measured_memory import MeasuredMemory, measure
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import WORKLOADS, Workload

import mirrorc
from mirrorc.runtime.memory.report import MemoryReport

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


def compared(workload: Workload, backend: str, num_devices: int) -> tuple[MemoryReport, MeasuredMemory]:
    """The report before the first step, and what was measured in those after it."""
    reports = []
    x, y = workload.make_batch(workload.per_replica * num_devices)

    def make_step() -> mirrorc.Step:
        torch.manual_seed(0)
        model = workload.make_model()
        devices = [f"cpu:{i}" for i in range(num_devices)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = mirrorc.compile(model, devices, optimizer=optimizer, loss_fn=workload.loss_fn, backend=backend)
        step.prepare(x, target=y)
        reports.append(step.memory())
        return step

    step, measured = measure(make_step, x, target=y)
    step.close()
    return reports[0], measured


def row(name: str, told: MemoryReport, measured: MeasuredMemory) -> str:
    """A row of the table."""
    pairs = [(getattr(told, kind) or 0, getattr(measured, kind)) for kind in KINDS]
    pairs += [(told.activations, sum(measured.activations)), (told.total, measured.total)]
    cells = [f"{one / 2**20:.1f} / {other / 2**20:.1f}" if one or other else "-" for one, other in pairs]
    ratios = [told.activations / sum(measured.activations), told.total / measured.total]
    return f"| {name} | {' | '.join(cells)} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |"


def main() -> None:
    """Compares what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = {**WORKLOADS, **DEEP}
    names = [name for name in workloads if name != "tiny"]  # its memory is that of Python's objects
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.devices)
    kinds = [kind.replace("_", " ") for kind in (*KINDS, "activations", "total")]
    print(f"| workload | {' | '.join(kinds)} | ratio of activations | ratio of totals |")
    print("|---" * (len(kinds) + 3) + "|")
    for name in options.workloads:
        print(row(name, *compared(workloads[name], options.backend, options.devices)), flush=True)


if __name__ == "__main__":
    main()
