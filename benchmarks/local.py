"""Compares training steps on this machine: mirrorc, PyTorch DDP, and one process on the whole batch.

    python benchmarks/local.py [--workloads mlp-64 gpt-8] [--contenders mirrorc DDP] [--rounds 8]

All contenders of a workload are started, then take turns of a few steps each, so that a noisy machine is noisy for all.
Prints a Markdown table of medians and of ratios.
"""

from __future__ import annotations

import argparse
import socket
import statistics

from contenders import CONTENDERS, Contender
from workloads import WORKLOADS


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(workload: str, names: list[str], rounds: int, steps: int) -> dict[str, tuple[float, float]]:
    """Median step and time to the first step of each contender, in seconds."""
    running = {}
    try:
        for name in names:
            running[name] = Contender(name, workload, free_port())
        times: dict[str, list[float]] = {name: [] for name in names}
        for contender in running.values():
            contender.run(2)
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                times[name] += running[name].run(steps)
        return {name: (statistics.median(times[name]), running[name].seconds_to_first_step) for name in names}
    finally:
        for contender in running.values():
            contender.close()


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    options = parser.parse_args()
    print("| workload | contender | median step, ms | mirrorc / contender | first step, s |")
    print("|---|---|---|---|---|")
    for workload in options.workloads:
        results = measure(workload, options.contenders, options.rounds, options.steps)
        own = results.get("mirrorc", (float("nan"), 0.0))[0]
        for name, (median, first) in results.items():
            print(f"| {workload} | {name} | {median * 1e3:.1f} | {own / median:.2f} | {first:.1f} |", flush=True)


if __name__ == "__main__":
    main()
