"""Compares compiling for one device with compiling for several: regions are shared, so it should hardly take longer.

    python benchmarks/compile_time.py [--workload gpt-8] [--devices 1 8] [--rounds 2]

Each measurement is a process of its own with an empty compiler cache. The shard has the same shape throughout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time


def measure(workload: str, num_devices: int) -> float:
    """Seconds from `mirrorc.compile` to a program that is ready to run, in a fresh process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--workload", workload, "--devices", str(num_devices), "--child"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    return float(done.stdout.splitlines()[-1])


def compile_once(workload_name: str, num_devices: int) -> float:
    """The measurement itself."""
    import torch
    from workloads import WORKLOADS

    import mirrorc

    workload = WORKLOADS[workload_name]
    model = workload.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = workload.make_batch(workload.per_replica * num_devices)
    started = time.perf_counter()
    with mirrorc.compile(model, devices=num_devices, optimizer=optimizer, loss_fn=workload.loss_fn) as step:
        step.prepare(x, target=y)
        return time.perf_counter() - started


def main() -> None:
    """Measures what the command line names and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt-8")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(compile_once(options.workload, options.devices[0]))
        return
    seconds: dict[int, list[float]] = {n: [] for n in options.devices}
    for _ in range(options.rounds):
        for n in options.devices:
            seconds[n].append(measure(options.workload, n))
    first = statistics.median(seconds[options.devices[0]])
    print("| devices | median compile time, s | ratio |\n|---|---|---|")
    for n, times in seconds.items():
        median = statistics.median(times)
        print(f"| {n} | {median:.1f} | {median / first:.2f} |")


if __name__ == "__main__":
    main()
