"""Measures compiling: the time to the first step against torch.compile, the same again with a cache, and 8 devices against 1.

    python benchmarks/compile_time.py [--workloads gpt-8 resnet-16] [--devices 1 8] [--rounds 3]

Each measurement is a process of its own. mirrorc trains on two logical CPUs with a thread each, torch.compile the same batch
in one process with two threads. The time goes from `mirrorc.compile` or `torch.compile` to the end of the first step (forward,
backward, a fused AdamW), without the imports before it. A first process finds all caches empty, precompiled headers too; a
second finds what the first has left. The second table is about `Step.prepare`, which makes a program ready to run, with empty
caches; shards have the same shape throughout. Prints Markdown tables of medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workloads import WORKLOADS, Workload

NUM_REPLICAS = 2


def seconds_of(job: str, workload: str, folder: str, num_devices: int = NUM_REPLICAS) -> float:
    """What one of JOBS takes in a fresh process whose compiler caches all lie in a folder."""
    caches = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}  # the former: headers
    command = [sys.executable, __file__, "--job", job, "--workloads", workload, "--devices", str(num_devices)]
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
    return float(done.stdout.splitlines()[-1])


def mirrorc_first_step(workload: Workload, num_devices: int) -> float:
    """Seconds from `mirrorc.compile` to the end of the first step."""
    return _mirrorc(workload, num_devices, lambda step, x, y: step(x, target=y))


def mirrorc_prepare(workload: Workload, num_devices: int) -> float:
    """Seconds from `mirrorc.compile` to a program that is ready to run."""
    return _mirrorc(workload, num_devices, lambda step, x, y: step.prepare(x, target=y))


def _mirrorc(workload: Workload, num_devices: int, use: Callable[..., object]) -> float:
    import torch

    import mirrorc

    model = workload.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = workload.make_batch(workload.per_replica * num_devices)
    devices = [f"cpu:{i}" for i in range(num_devices)]
    started = time.perf_counter()
    with mirrorc.compile(model, devices, optimizer=optimizer, loss_fn=workload.loss_fn) as step:
        use(step, x, y)
        return time.perf_counter() - started


def torch_first_step(workload: Workload, num_devices: int) -> float:
    """Seconds from `torch.compile` of model and loss to the end of the first step, on the batch of ``num_devices`` devices."""
    import torch
    from contenders import WithLoss

    module = WithLoss(workload)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    x, y = workload.make_batch(workload.per_replica * num_devices)
    started = time.perf_counter()
    torch.compile(module)(x, y).backward()
    optimizer.step()
    return time.perf_counter() - started


JOBS = {"mirrorc": mirrorc_first_step, "torch.compile": torch_first_step, "prepare": mirrorc_prepare}


def against_torch(workloads: list[str], rounds: int) -> None:
    """Prints the table of first steps, without a cache and with one."""
    again = ("mirrorc again, s", "of the first", "torch.compile again, s", "of the first")
    print(f"| workload | mirrorc, s | torch.compile, s | ratio | {' | '.join(again)} |")
    print("|---|---|---|---|---|---|---|---|")
    for workload in workloads:
        times: dict[str, list[tuple[float, float]]] = {"mirrorc": [], "torch.compile": []}
        for turn in range(rounds):
            for name in times if turn % 2 == 0 else reversed(times):
                with tempfile.TemporaryDirectory() as folder:
                    times[name].append((seconds_of(name, workload, folder), seconds_of(name, workload, folder)))
        first, second = ([statistics.median(pair[i] for pair in pairs) for pairs in times.values()] for i in (0, 1))
        row = f"| {workload} | {first[0]:.1f} | {first[1]:.1f} | {first[0] / first[1]:.2f} "
        row += "".join(f"| {second[i]:.1f} | {second[i] / first[i]:.2f} " for i in (0, 1))
        print(f"{row}|", flush=True)


def more_devices(workloads: list[str], devices: list[int], rounds: int) -> None:
    """Prints the table of preparing for several numbers of devices."""
    print("| workload | devices | prepared in, s | ratio |\n|---|---|---|---|")
    for workload in workloads:
        times: dict[int, list[float]] = {n: [] for n in devices}
        for _ in range(rounds):
            for n in devices:
                with tempfile.TemporaryDirectory() as folder:
                    times[n].append(seconds_of("prepare", workload, folder, n))
        medians = {n: statistics.median(seconds) for n, seconds in times.items()}
        for n, median in medians.items():
            print(f"| {workload} | {n} | {median:.1f} | {median / medians[devices[0]]:.2f} |", flush=True)


def main() -> None:
    """Measures what the command line names and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["gpt-8", "resnet-16", "mlp-8"], choices=list(WORKLOADS))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["against-torch", "more-devices"], help="one of the tables")
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(JOBS[options.job](WORKLOADS[options.workloads[0]], options.devices[0]))
        return
    if options.only != "more-devices":
        against_torch(options.workloads, options.rounds)
    if options.only != "against-torch":
        print()
        more_devices(options.workloads, options.devices, options.rounds)


if __name__ == "__main__":
    main()
