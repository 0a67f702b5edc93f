"""Compares training steps on this machine: mirrorc, PyTorch DDP, one process on the whole batch, and TensorFlow.

    python benchmarks/local.py [--workloads mlp-64 gpt-8] [--contenders mirrorc DDP] [--rounds 8] [--no-memory]
    python benchmarks/local.py --contenders mirrorc TensorFlow --tensorflow-python .venv-tf/bin/python
    python benchmarks/local.py --contenders mirrorc "mirrorc before" --before-python ../another-checkout/.venv/bin/python

All contenders of a workload are started, and their steps are interleaved, so that noise of the machine affects all. Then
each is started alone, to see how much memory its processes take. Prints a Markdown table of medians and of ratios.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from contenders import CONTENDERS
from processes import ContenderProcesses
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
TENSORFLOW = "TensorFlow"
BEFORE = "mirrorc before"  # that of another checkout


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Interpreters:
    """Python interpreters of other environments: that of TensorFlow, and that of another checkout of mirrorc."""

    tensorflow: str
    before: str


def start(name: str, workload: str, others: Interpreters) -> ContenderProcesses:
    """Starts a contender on a workload; returns when it has made its first step."""
    if name == TENSORFLOW:
        sizes = ["--per-replica", str(WORKLOADS[workload].per_replica)]
        return ContenderProcesses([[others.tensorflow, str(HERE / "tensorflow_contender.py"), workload, *sizes]])
    python, name = (others.before, "mirrorc") if name == BEFORE else (sys.executable, name)
    command = [python, str(HERE / "contenders.py"), name, workload, "--port", str(free_port()), "--rank"]
    return ContenderProcesses([[*command, str(rank)] for rank in range(CONTENDERS[name][0])])


@dataclass
class Result:
    """What was measured of a contender: seconds of a median step and to the first one, bytes at peak."""

    step: float
    first: float
    memory: float = float("nan")


def measure(workload: str, names: list[str], rounds: int, steps: int, others: Interpreters) -> dict[str, Result]:
    """Median step and time to the first step of each contender."""
    running: dict[str, ContenderProcesses] = {}
    try:
        for name in names:
            running[name] = start(name, workload, others)
        times: dict[str, list[float]] = {name: [] for name in names}
        for contender in running.values():
            contender.run(2)
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                times[name] += running[name].run(steps)
        return {name: Result(statistics.median(times[name]), running[name].seconds_to_first_step) for name in names}
    finally:
        for contender in running.values():
            contender.close()


def peak_memory(workload: str, name: str, steps: int, others: Interpreters) -> int:
    """Bytes at peak of a contender that runs alone."""
    contender = start(name, workload, others)
    try:
        return contender.peak_memory(steps)
    finally:
        contender.close()


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=[*CONTENDERS, TENSORFLOW, BEFORE])
    parser.add_argument("--tensorflow-python", default=str(HERE.parent / ".venv-tf" / "bin" / "python"), metavar="PATH")
    parser.add_argument(
        "--before-python", default=sys.executable, metavar="PATH", help="of another checkout of mirrorc"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn; a hundred times as many of the tiny one")
    parser.add_argument("--no-memory", action="store_true", help="do not start each contender again to see its memory")
    options = parser.parse_args()
    others = Interpreters(options.tensorflow_python, options.before_python)
    print(
        "| workload | contender | median step, ms | mirrorc / contender | memory, MiB | mirrorc / contender | first step, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for workload in options.workloads:
        steps = options.steps * (100 if workload == "tiny" else 1)
        results = measure(workload, options.contenders, options.rounds, steps, others)
        for name, result in results.items() if not options.no_memory else ():
            result.memory = peak_memory(workload, name, 4 * steps, others)
        own = results.get("mirrorc", Result(float("nan"), 0.0))
        for name, result in results.items():
            milliseconds, mebibytes = result.step * 1e3, result.memory / 2**20
            row = f"| {workload} | {name} | {milliseconds:.{1 if milliseconds > 10 else 3}f} | {own.step / result.step:.2f} "
            row += f"| {mebibytes:.0f} | {own.memory / result.memory:.2f} | {result.first:.1f} |"
            print(row.replace("nan", ""), flush=True)


if __name__ == "__main__":
    main()
