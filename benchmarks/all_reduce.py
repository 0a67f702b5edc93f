"""Times every algorithm of all-reduce by itself, on logical CPUs, beside a bare copy of the memory.

    python benchmarks/all_reduce.py                       # 2, 4 and 8 logical CPUs, 4 KB to 64 MB: about two minutes
    python benchmarks/all_reduce.py --devices 2 --kb 64

Each device's thread runs its graph of a step that has one sum alone, over the link that steps on logical CPUs have, again and
again; all begin together, and the time is that of the last one. Algorithms take turns, and the table has medians. The copy is
the limit: each device copies its own bucket, at the same time as the others.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.all_reduce_algorithms import ALGORITHMS
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.ir.routes import route_of
from mirrorc.passes import LowerDevices
from mirrorc.passes.all_reduce.sketch import sketched
from mirrorc.runtime.communication import Communicator, communicators_of

DEVICES, KILOBYTES = (2, 4, 8), (4, 64, 1024, 16384, 65536)
LINK, TIMEOUT_SECONDS = "shared-memory", 60.0
SECONDS_EACH = 0.35  # for one algorithm, on one number of devices, with one size
COPY = "a copy"


def device_step(program: Program, replica: int, packed: torch.Tensor, link: Communicator) -> Callable[[], None]:
    """A function that does what one device does of a sum."""
    graph = list(program.device_graphs.values())[replica].graph

    def step() -> None:
        values: dict[Any, Any] = {}
        for node in graph.nodes:
            args = [
                values.get(arg, arg) if not isinstance(arg, list | tuple) else [values[one] for one in arg]
                for arg in node.args
            ]
            if node.target is ops.pack:
                values[node] = packed
            elif node.target is ops.send:
                link.send(route_of(program, node), args[0])
            elif node.target is ops.recv:
                link.launch_receive(route_of(program, node))
            elif node.target is ops.all_reduce:
                values[node] = link.launch_all_reduce(0, replica, args[0])
            elif node.target is ops.wait:
                launch = node.args[0]
                if launch.target is ops.recv:
                    values[node] = link.receive(route_of(program, launch))
                else:
                    values[node] = link.wait_all_reduce(0, replica, args[0])
            elif node.op == "call_function" and node.target not in (ops.read, ops.update):
                values[node] = node.target(*args, **node.kwargs)

    return step


def steps_of(
    name: str, num_devices: int, buckets: Sequence[torch.Tensor]
) -> tuple[list[Callable[[], None]], Callable[[], object]]:
    """What each device does, and what is to be done between two sums."""
    if name == COPY:
        copies = [torch.empty_like(bucket) for bucket in buckets]
        return [lambda i=i: copies[i].copy_(buckets[i]) for i in range(num_devices)], lambda: None  # type: ignore[misc]
    program = LowerDevices().run(sketched(ALGORITHMS[name](), num_devices, buckets[0].numel(), LINK))
    (link,) = communicators_of(program, TIMEOUT_SECONDS).values()
    return [device_step(program, i, buckets[i], link) for i in range(num_devices)], link.release


def timed(steps: Sequence[Callable[[], None]], between: Callable[[], object], seconds: float) -> list[float]:
    """The milliseconds of sums that threads make together, for so many seconds."""
    times: list[float] = []
    begins, ends, is_over = threading.Barrier(len(steps) + 1), threading.Barrier(len(steps) + 1), threading.Event()

    def run(step: Callable[[], None]) -> None:
        while True:
            begins.wait()
            if is_over.is_set():
                return
            step()
            ends.wait()

    threads = [threading.Thread(target=run, args=(step,), daemon=True) for step in steps]
    for thread in threads:
        thread.start()
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        begins.wait()
        start = time.perf_counter()
        ends.wait()
        times.append(1e3 * (time.perf_counter() - start))
        between()
    is_over.set()
    begins.wait()
    for thread in threads:
        thread.join()
    return times[1:]  # the first one is warm-up


def measure(num_devices: int, num_bytes: int) -> dict[str, float]:
    """The median milliseconds of a sum by each algorithm, and of a copy."""
    buckets = [torch.zeros(num_bytes // 4) for _ in range(num_devices)]
    names = [COPY, *(name for name in ALGORITHMS if name != "auto")]
    made = {name: steps_of(name, num_devices, buckets) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(3):  # they take turns
        for name, (steps, between) in made.items():
            found[name] += timed(steps, between, SECONDS_EACH / 3)
    return {name: statistics.median(times) for name, times in found.items()}


def size_text(kilobytes: int) -> str:
    return f"{kilobytes} KB" if kilobytes < 1024 else f"{kilobytes // 1024} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--kb", type=int, nargs="+", default=KILOBYTES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for num_devices in options.devices:
        columns = [measure(num_devices, 1024 * kilobytes) for kilobytes in options.kb]
        print(f"\n| {num_devices} logical CPUs, ms | " + " | ".join(map(size_text, options.kb)) + " |")
        print("|---|" + "---|" * len(columns))
        for name in columns[0]:
            print(f"| {name} | " + " | ".join(f"{column[name]:.3g}" for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
