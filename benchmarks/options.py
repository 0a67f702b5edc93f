"""Measures what options cost: steps with and without them are interleaved in one process.

    python benchmarks/options.py [--workloads tiny mlp-8] [--options outputs clip-idle] [--backend inductor] [--seconds 20]

All run on two logical CPUs with a thread each, by fused AdamW with a small learning rate: a batch that is learnt by heart has
gradients that vanish, which take longer to compute with. There are two plain steps, which show by what equal steps
differ. The steps take turns, and each round has an order of its own, drawn at random: noise of the machine then affects all
alike, and so does what the step before leaves in the caches. Prints a Markdown table: the median of the plain steps, and each
option's median divided by it. Below it is the memory that the largest device's activations take with each, as `Step.memory`
tells it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from typing import Any

import torch
from workloads import WORKLOADS, Workload

import mirrorc
from mirrorc.options.table import grouped

NUM_REPLICAS = 2
PLAIN = ("plain", "plain again")
OPTIONS: dict[str, dict[str, Any]] = {
    "outputs": {"return_outputs": True},
    "check-finite": {"check_finite": True},
    "norm": {"clip_grad_norm": float("inf")},  # only measured
    "clip-idle": {"clip_grad_norm": 1e6},  # measured, never scaled
    "clip": {"clip_grad_norm": 1e-3},  # scaled in every step
    "clip-value": {"clip_grad_value": 1e-3},
    "microbatches": {"microbatches": 4},
    "scaler": {},  # with a GradScaler of its own
}


def compiled(workload: Workload, backend: str, option: str) -> mirrorc.Step:
    """A step of a workload; the same model each time."""
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    given = dict(OPTIONS.get(option, {}))
    if option == "scaler":
        given["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    devices = [f"cpu:{i}" for i in range(NUM_REPLICAS)]
    return mirrorc.compile(
        model, devices, optimizer=optimizer, loss_fn=workload.loss_fn, **grouped({"backend": backend, **given})
    )


def measure(
    workload: Workload, backend: str, options: list[str], seconds_each: float
) -> tuple[dict[str, float], dict[str, int]]:
    """The median seconds of a step, plain ones and with each option, and the bytes of the largest device's activations."""
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)
    names = [*PLAIN, *options]
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(compiled(workload, backend, name)) for name in names}
        for step in steps.values():
            for _ in range(40 if workload.name == "tiny" else 4):  # the way to run is chosen, and caches are filled
                step(x, target=y)
        held = {name: max(one.own.activations for one in step.memory().devices) for name, step in steps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        end, order = time.perf_counter() + seconds_each * len(names), random.Random(0)
        while time.perf_counter() < end:
            for name in order.sample(names, len(names)):
                begun = time.perf_counter()
                steps[name](x, target=y)
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}, held


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each kind of step")
    options = parser.parse_args()
    torch.set_num_threads(NUM_REPLICAS)
    print(f"| workload | plain, ms | plain again | {' | '.join(options.options)} |")
    print("|---|---|---|" + "---|" * len(options.options))
    for name in options.workloads:
        found, held = measure(WORKLOADS[name], options.backend, options.options, options.seconds)
        plain = statistics.mean(found[name] for name in PLAIN)
        ratios = [f"{found[option] / plain:.3f}" for option in (PLAIN[1], *options.options)]
        print(f"| {name} | {plain * 1e3:.3f} | {' | '.join(ratios)} |")
        sizes = [f"{held[option] / 2**20:.1f} MiB" for option in (*PLAIN, *options.options)]
        print(f"| {name}, activations | {' | '.join(sizes)} |", flush=True)


if __name__ == "__main__":
    main()
