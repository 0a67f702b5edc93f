"""Steps over copies of a sparse table: the rows that the optimizer has written are sent alone, or the whole table is.

    python benchmarks/sparse_tables.py                                 # both optimizers, 320 to 80,000 lookups: about two minutes
    python benchmarks/sparse_tables.py --optimizers SGD --lookups 320 20000 --seconds 10
    python benchmarks/sparse_tables.py --devices 4 --lookups 20000

The table has 200,000 rows of width 64, and each device has a copy of it and a thread. One step sends rows by the pass send-rows,
with a bound that any number of them keeps; the other one is compiled without this pass. Both have the same
batches, whose words are drawn anew for each of several, and take turns, either of them first in every other turn: noise of the
machine affects both. Prints a Markdown table of medians and of their ratio, and where the pass's own bound sends rows.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import mirrorc
from mirrorc.options.table import grouped
from mirrorc.passes import SendRows

ROWS, WIDTH, WORDS_OF_EXAMPLE, NUM_BATCHES = 200_000, 64, 10, 8
LOOKUPS = (320, 8_000, 20_000, 25_000, 40_000, 80_000)
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=1e-3),
}
KINDS: dict[str, dict[str, Any]] = {
    "rows": {"disable": ["share-parameters"], "add": [mirrorc.after("send-rows", SendRows(most_in_one_memory=1))]},
    "whole table": {"disable": ["share-parameters", "send-rows"]},
}
"""What is sent, and the options that have it sent."""


class Bags(nn.Module):
    """The distance of each example's words, of which it has the mean, to a target."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.words(x).mean(1) - y).square().mean()


def compiled(kind: str, optimizer: str, num_devices: int, backend: str) -> mirrorc.Step:
    """A step of which each device has a copy of the table; the same model each time."""
    torch.manual_seed(0)
    model = Bags()
    devices = [f"cpu:{i}" for i in range(num_devices)]
    own = OPTIMIZERS[optimizer](model.parameters())
    return mirrorc.compile(
        model, devices, optimizer=own, **grouped({"backend": backend, "link": "copy", "progress": False, **KINDS[kind]})
    )


def batches_of(lookups: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Examples of so many words together, drawn from the whole table, and their targets."""
    generator = torch.Generator().manual_seed(lookups)
    examples = lookups // WORDS_OF_EXAMPLE
    return [
        (
            torch.randint(ROWS, (examples, WORDS_OF_EXAMPLE), generator=generator),
            torch.randn(examples, WIDTH, generator=generator),
        )
        for _ in range(NUM_BATCHES)
    ]


def measure(optimizer: str, lookups: int, args: argparse.Namespace) -> dict[str, float]:
    """The median seconds of a step of each kind."""
    batches = batches_of(lookups)
    with contextlib.ExitStack() as stack:
        steps = {kind: stack.enter_context(compiled(kind, optimizer, args.devices, args.backend)) for kind in KINDS}
        for step in steps.values():
            for x, y in batches:  # it is compiled, and caches are filled
                step(x, y)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        turn, end = 0, time.perf_counter() + args.seconds * len(KINDS)
        while turn < 2 or time.perf_counter() < end:
            x, y = batches[turn % NUM_BATCHES]
            for kind in steps if turn % 2 else reversed(steps):
                begun = time.perf_counter()
                steps[kind](x, y)
                seconds[kind].append(time.perf_counter() - begun)
            turn += 1
    return {kind: statistics.median(times) for kind, times in seconds.items()}


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--lookups", type=int, nargs="+", default=LOOKUPS, help="of all devices together, in a step")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each kind of step")
    args = parser.parse_args()
    least = WORDS_OF_EXAMPLE * args.devices
    if not all(least <= lookups < ROWS for lookups in args.lookups):
        parser.error(
            f"--lookups: give {least} or more, so that each device has examples, and fewer than the {ROWS:,} rows of the table"
        )
    torch.set_num_threads(args.devices)
    print("| optimizer | lookups | rows, ms | whole table, ms | rows / whole table | what the bound sends |")
    print("|---|---|---|---|---|---|")
    bound = SendRows().most_in_one_memory * ROWS
    for optimizer in args.optimizers:
        for lookups in args.lookups:
            rows, whole = measure(optimizer, lookups, args).values()
            sent = "rows" if lookups <= bound else "the table"
            print(
                f"| {optimizer} | {lookups:,} | {rows * 1e3:.2f} | {whole * 1e3:.2f} | {rows / whole:.2f} | {sent} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
