"""Measures what recording costs: steps with ``record=True`` and ``record=False`` are interleaved in one process.

    python benchmarks/recording.py [--workloads tiny mlp-8] [--backend inductor] [--steps 2000] [--pairs 7]

Both run on two logical CPUs with a thread each. They alternate step by step, and so does their order, so that noise of the
machine affects both. Two equal compiled steps differ by about a percent, depending on where their memory is, so several pairs are
compiled. Prints a Markdown table: medians over the pairs of their median steps and of their ratios, with the least and the
largest ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from workloads import WORKLOADS, Workload

import mirrorc

NUM_REPLICAS = 2
DEFAULT_STEPS = {"tiny": 2000}


def compiled(workload: Workload, backend: str, record: bool) -> mirrorc.Step:
    """A step of a workload; the same model each time."""
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    devices = [f"cpu:{i}" for i in range(NUM_REPLICAS)]
    return mirrorc.compile(
        model, devices, optimizer=optimizer, loss_fn=workload.loss_fn, compiler=mirrorc.Compiler(backend=backend)
    )


def measure(workload: Workload, backend: str, num_steps: int) -> dict[bool, float]:
    """Median seconds of a step without and with recording, of one pair."""
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)
    with compiled(workload, backend, False) as without, compiled(workload, backend, True) as recording:
        steps = {False: without, True: recording}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(-max(2, num_steps // 10), num_steps):
            for record in (False, True) if turn % 2 == 0 else (True, False):
                begun = time.perf_counter()
                steps[record](x, target=y)
                if turn >= 0:  # those before warm up
                    seconds[record].append(time.perf_counter() - begun)
        return {record: statistics.median(times) for record, times in seconds.items()}


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["tiny", "mlp-8"], choices=list(WORKLOADS))
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--steps", type=int, help="steps of each in a pair; 2000 of the tiny one, 20 of others")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(NUM_REPLICAS)
    print("| workload | record=False, ms | record=True, ms | ratio | of the pairs |")
    print("|---|---|---|---|---|")
    for name in options.workloads:
        num_steps = options.steps or DEFAULT_STEPS.get(name, 20)
        pairs = [measure(WORKLOADS[name], options.backend, num_steps) for _ in range(options.pairs)]
        without, recording = (statistics.median(pair[record] for pair in pairs) * 1e3 for record in (False, True))
        ratios = sorted(pair[True] / pair[False] for pair in pairs)
        row = f"| {name} | {without:.3f} | {recording:.3f} | {statistics.median(ratios):.3f} "
        print(f"{row}| {ratios[0]:.3f} to {ratios[-1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
