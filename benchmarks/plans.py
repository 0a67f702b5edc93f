"""Compares predicted steps of bucket plans with measured ones, over two hosts.

    python benchmarks/plans.py [--gigabits 2] [--workloads gpt-8 mlp-64] [--plans 1/1 4/1 10/1 25/1 25/25] [--rounds 5]
    python benchmarks/plans.py --gigabits 0      # on the loopback interface, which nothing limits; needs no root

The hosts are network namespaces of this machine, with one worker of one thread on each. Steps with ``bucket_cap_mb="auto"``
predict from their first steps, with one plan, what the others take. Then each plan, given by its numbers, is measured, some
steps of each at a time, so that noise of the machine affects all. Prints a row for each plan: what was predicted, the median of
the rounds of what steps have recorded, the error, and the noise, which is the spread of the rounds as a part of their median.
Then the mean error of the plans from which nothing was learned, and by how much the chosen plan is slower than the best.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hosts import ADDRESSES, INTERFACE, two_hosts, why_not
from local import free_port
from plan_contenders import AUTO, NUM_WORKERS
from processes import ContenderProcesses
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
PLANS = ("1/1", "4/1", "10/1", "25/1", "25/25")  # bucket_cap_mb/first_bucket_mb
MEASURED = "25/1"  # with which steps begin, so that from it alone is learned
_STEPS_UNTIL_CHOSEN = 12


class PlanProcesses(ContenderProcesses):
    """The workers of one plan."""

    def tell(self, count: int) -> dict[str, Any]:
        """What worker 0 tells of its last steps, of which these are ``count``; the slowest worker's step counts."""
        self._ask(count)
        answers = self._answers()
        return {**answers[0], "step_ms": max(own["step_ms"] for own in answers)}


def start(plan: str, workload: str, hosts: Sequence[Sequence[str]], options: argparse.Namespace) -> PlanProcesses:
    """Starts the workers of a plan, one on each host; returns when they have made their first step."""
    is_limited = any(hosts)
    place = ["--address", ADDRESSES[0] if is_limited else "127.0.0.1", "--interface", INTERFACE if is_limited else "lo"]
    command = [sys.executable, str(HERE / "plan_contenders.py"), plan, workload, *place, "--port", str(free_port())]
    command += ["--exchange", options.exchange, *(["--eager"] if options.eager else [])]
    return PlanProcesses([[*host, *command, "--rank", str(rank)] for rank, host in enumerate(hosts)])


def predictions(remark: str) -> dict[str, float]:
    """The predicted milliseconds by plan, as a program's remark says them."""
    return {plan: float(ms) for plan, ms in re.findall(r"(\d+/\d+) ([\d.]+(?:e[+-]\d+)?)", remark)}


def compare(workload: str, hosts: Sequence[Sequence[str]], options: argparse.Namespace) -> None:
    """Measures a workload and prints its rows."""
    with contextlib.ExitStack() as running:
        chooser = start(AUTO, workload, hosts, options)
        running.callback(chooser.close)
        told = chooser.tell(_STEPS_UNTIL_CHOSEN)
        predicted = predictions(told["remark"])
        print(f"\n{workload}: {told['remark']}\n")
        if options.explain:
            print(told["explained"])
        contenders = {}
        for plan in options.plans:
            contenders[plan] = start(plan, workload, hosts, options)
            running.callback(contenders[plan].close)
            contenders[plan].tell(3)
        measured: dict[str, list[float]] = {plan: [] for plan in options.plans}
        again: dict[str, list[float]] = {plan: [] for plan in options.plans}
        buckets = {}
        for turn in range(options.rounds):
            for plan in options.plans if turn % 2 == 0 else reversed(options.plans):
                found = contenders[plan].tell(options.steps)
                measured[plan].append(found["step_ms"])
                again[plan].append(found["predicted_ms"])
                buckets[plan] = found["num_buckets"]
        print_rows(predicted, measured, again, buckets)
        chosen = re.search(r"bucket_cap_mb=([\d.]+), first_bucket_mb=([\d.]+)", told["remark"])
        assert chosen is not None, "the remark names the chosen sizes"
        print_sum(predicted, measured, "/".join(chosen.groups()))


def print_rows(
    predicted: dict[str, float],
    measured: dict[str, list[float]],
    again: dict[str, list[float]],
    buckets: dict[str, int],
) -> None:
    """Prints a row for each plan."""
    print("| plan, MiB | buckets | predicted, ms | measured, ms | error | noise | predicted from its own steps, ms |")
    print("|---|---|---|---|---|---|---|")
    for plan, rounds in measured.items():
        median = statistics.median(rounds)
        noise = (max(rounds) - min(rounds)) / median
        own = statistics.median(again[plan])
        told = f"{predicted[plan]:.1f} | {median:.1f} | {predicted[plan] / median - 1:+.1%}"
        print(f"| {plan} | {buckets[plan]} | {told} | {noise:.1%} | {own:.1f} |", flush=True)


def print_sum(predicted: dict[str, float], measured: dict[str, list[float]], chosen: str) -> None:
    """Prints the mean error, and what the chosen plan costs beside the best."""
    medians = {plan: statistics.median(rounds) for plan, rounds in measured.items()}
    errors = [abs(predicted[plan] / ms - 1) for plan, ms in medians.items() if plan != MEASURED]
    best = min(medians, key=medians.__getitem__)
    print(f"\nmean error of plans from which nothing was learned: {statistics.fmean(errors):.1%}")
    if chosen in medians:
        loss = medians[chosen] / medians[best] - 1
        print(f"chosen: {chosen}, {loss:+.1%} beside the best of those measured, {best}")
    else:
        print(f"chosen: {chosen}, which was not measured; best of those measured: {best}")


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, default=2.0, help="what a host sends in a second; 0: loopback")
    parser.add_argument("--workloads", nargs="+", default=["gpt-8", "mlp-64"], choices=list(WORKLOADS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS), help="of those that bucket_cap_mb='auto' predicts")
    parser.add_argument("--exchange", default="dense", choices=["auto", "dense", "factors"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="steps in a turn; a step records its last 32")
    parser.add_argument("--explain", action="store_true", help="print how the steps are explained that predict")
    parser.add_argument("--eager", action="store_true", help="regions are not compiled")
    options = parser.parse_args()
    if options.gigabits and (why := why_not()):
        parser.error(f"hosts cannot be made on this machine: {why}; --gigabits 0 measures on the loopback interface")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MIRRORC_CACHE_DIR"] = folder
        for workload in options.workloads:
            with contextlib.ExitStack() as ending:
                loopback: list[list[str]] = [[] for _ in range(NUM_WORKERS)]
                hosts = ending.enter_context(two_hosts(options.gigabits)) if options.gigabits else loopback
                compare(workload, hosts, options)


if __name__ == "__main__":
    main()
