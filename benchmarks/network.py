"""Compares training steps of two hosts: mirrorc, and DistributedDataParallel with several sizes of bucket.

    python benchmarks/network.py [--gigabits 1 2 5 10] [--workloads mlp-64 gpt-8] [--contenders mirrorc "DDP 25 MB"] [--rounds 6]
    python benchmarks/network.py --gigabits 0      # on the loopback interface, which nothing limits; needs no root

The hosts are network namespaces of this machine, with one worker of one thread on each. All contenders of a workload are
started, and their steps are interleaved, so that noise of the machine affects all. Prints a Markdown table of medians, their
spread, and ratios to the DDP whose median is least; one that sends half the bits, or a part of them, is no measure for that.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from hosts import ADDRESSES, INTERFACE, two_hosts, why_not
from local import free_port
from network_contenders import NETWORK_CONTENDERS, NUM_WORKERS
from processes import ContenderProcesses
from workloads import WORKLOADS

WARM_UP = 12  # steps
HERE = Path(__file__).resolve().parent
CAPS = ("DDP 1 MB", "DDP 5 MB", "DDP 25 MB")
DEFAULT_WORKLOADS = ("mlp-64", "mlp-8", "gpt-8", "recommender-256")


def start(name: str, workload: str, hosts: Sequence[Sequence[str]], is_eager: bool) -> ContenderProcesses:
    """Starts a contender's workers, one on each host; returns when they have made their first step."""
    is_limited = any(hosts)
    place = ["--address", ADDRESSES[0] if is_limited else "127.0.0.1", "--interface", INTERFACE if is_limited else "lo"]
    port = str(free_port())  # in a host of our own nothing listens
    command = [sys.executable, str(HERE / "network_contenders.py"), name, workload, *place, "--port", port]
    command += ["--eager"] if is_eager else []
    return ContenderProcesses([[*host, *command, "--rank", str(rank)] for rank, host in enumerate(hosts)])


def measure(
    workload: str, names: Sequence[str], hosts: Sequence[Sequence[str]], rounds: int, steps: int, is_eager: bool
) -> dict[str, list[float]]:
    """Seconds of the median step in each round, of each contender."""
    with contextlib.ExitStack() as running:
        contenders = {}
        for name in names:
            contenders[name] = start(name, workload, hosts, is_eager)
            running.callback(contenders[name].close)
        for contender in contenders.values():
            contender.run(WARM_UP)
        medians: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                medians[name].append(statistics.median(contenders[name].run(steps)))
        return medians


def print_rows(gigabits: float, workload: str, medians: dict[str, list[float]]) -> None:
    """Prints a row for each contender."""
    best = min((statistics.median(medians[name]) for name in CAPS if name in medians), default=float("nan"))
    link = f"{gigabits:g} Gbit/s" if gigabits else "loopback"
    for name, seconds in medians.items():
        median = statistics.median(seconds)
        row = f"| {link} | {workload} | {name} | {median * 1e3:.1f} | {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} "
        print(f"{row}| {median / best:.2f} |".replace("nan", ""), flush=True)


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gigabits", nargs="+", type=float, default=[2.0], help="what a host sends in a second; 0: loopback"
    )
    parser.add_argument("--workloads", nargs="+", default=list(DEFAULT_WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(NETWORK_CONTENDERS), choices=list(NETWORK_CONTENDERS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--eager", action="store_true", help="neither mirrorc nor DDP compiles")
    options = parser.parse_args()
    if any(options.gigabits) and (why := why_not()):
        parser.error(f"hosts cannot be made on this machine: {why}; --gigabits 0 measures on the loopback interface")
    print("| link | workload | contender | median step, ms | of the rounds | / best DDP |")
    print("|---|---|---|---|---|---|")
    for gigabits in options.gigabits:
        for workload in options.workloads:
            with contextlib.ExitStack() as ending:
                loopback: list[list[str]] = [[] for _ in range(NUM_WORKERS)]
                hosts = ending.enter_context(two_hosts(gigabits)) if gigabits else loopback
                medians = measure(workload, options.contenders, hosts, options.rounds, options.steps, options.eager)
            print_rows(gigabits, workload, medians)


if __name__ == "__main__":
    main()
