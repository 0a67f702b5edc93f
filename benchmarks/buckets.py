"""Compares bucket sizes: what the microbenchmark of ``bucket_cap_mb="auto"`` measures, and what real steps take.

    python benchmarks/buckets.py [--workload mlp-8] [--caps 1 4 16 25 64] [--rounds 8] [--steps 3] [--optimizer AdamW]

All steps run on two logical CPUs with a thread each, in one process; they are interleaved, a few steps at a time, so that a
noisy machine is noisy for all. The microbenchmark is run anew, in a cache of its own. Prints a Markdown table: for each cap, with
a first bucket as large, the microbenchmark's time and that of a median step; then the step with mirrorc's default sizes, and with
those that "auto" chooses. That is one of the former again: how far the two differ is how noisy the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, Workload

import mirrorc

NUM_REPLICAS = 2
Sizes = dict[str, Any]  # options of mirrorc.compile


@contextlib.contextmanager
def empty_cache() -> Iterator[Path]:
    """A directory for what microbenchmarks keep."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["MIRRORC_CACHE_DIR"] = directory
        yield Path(directory)


def compiled(workload: Workload, backend: str, optimizer: str, sizes: Sizes) -> mirrorc.Step:
    """A step of a workload; the same model each time."""
    torch.manual_seed(0)
    model = workload.make_model()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    devices = [f"cpu:{i}" for i in range(NUM_REPLICAS)]
    return mirrorc.compile(model, devices, optimizer=made, loss_fn=workload.loss_fn, backend=backend, **sizes)


def step_seconds(options: argparse.Namespace, kinds: list[Sizes]) -> tuple[list[float], list[mirrorc.Program]]:
    """The median step of each kind, and its program."""
    workload = WORKLOADS[options.workload]
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)
    seconds: list[list[float]] = [[] for _ in kinds]
    with contextlib.ExitStack() as stack:
        steps = [stack.enter_context(compiled(workload, options.backend, options.optimizer, sizes)) for sizes in kinds]
        for step in steps:
            for _ in range(3):
                step(x, target=y)
        for turn in range(options.rounds):
            for i in range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps))):
                for _ in range(options.steps):
                    begun = time.perf_counter()
                    steps[i](x, target=y)
                    seconds[i].append(time.perf_counter() - begun)
        return [statistics.median(times) for times in seconds], [step.program for step in steps]


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mlp-8", choices=list(WORKLOADS))
    parser.add_argument("--caps", nargs="+", type=float, default=[1, 4, 16, 25, 64])
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    options = parser.parse_args()
    torch.set_num_threads(NUM_REPLICAS)
    alike = [{"bucket_cap_mb": cap, "first_bucket_mb": cap} for cap in options.caps]
    with empty_cache() as cache:
        seconds, programs = step_seconds(options, [*alike, {}, {"bucket_cap_mb": "auto"}])
        kept = [json.loads(path.read_text())["result"]["milliseconds"] for path in cache.iterdir()]
    ladder: dict[str, float] = kept[0] if kept else {}
    print("| cap, MiB | buckets | microbenchmark, ms | step, ms |\n|---|---|---|---|")
    names = [f"{cap:g}" for cap in options.caps] + ["default", "auto"]
    for name, program, median in zip(names, programs, seconds, strict=True):
        print(f"| {name} | {len(program.buckets)} | {ladder.get(name, '')} | {1e3 * median:.2f} |")
    print(f"\n{next(remark for remark in programs[-1].remarks if remark.startswith('bucket sizes'))}")


if __name__ == "__main__":
    main()
