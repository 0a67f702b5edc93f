"""Ragged text: steps of programs with symbolic sizes beside those that were compiled for each size, and beside torch.compile.

A classifier of text of many lengths and some batch sizes is trained: how often it is compiled, and how long first calls take.
Then steps of the same batches are timed in turns, those of ``dynamic=None`` and ``dynamic=False``, either of them first in every
other turn, and by themselves those of `torch.compile`, whose threads go on waiting for work for a while after each step.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mirrorc

WORDS = 2000


class Model(nn.Module):
    """A transformer that classifies text."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(512, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(depth)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.tokens(x) + self.places(torch.arange(x.size(1))))
        return F.cross_entropy(self.head(hidden.mean(1)), y)


def batch(num_examples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, WORDS, (num_examples, length)), torch.randint(0, 16, (num_examples,))


Trainer = Callable[[torch.Tensor, torch.Tensor], Any]


def mirrored(args: argparse.Namespace, dynamic: bool | None) -> tuple[Trainer, mirrorc.Step]:
    torch.manual_seed(0)
    model = Model(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    devices = [f"cpu:{i}" for i in range(args.devices)]
    step = mirrorc.compile(
        model,
        devices,
        optimizer=optimizer,
        compiler=mirrorc.Compiler(backend=args.backend, dynamic=dynamic),
        debug=mirrorc.Debug(progress=False),
    )
    return step, step


def compiled_by_torch(args: argparse.Namespace) -> Trainer:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model, dynamic=None, backend="inductor" if args.backend == "inductor" else "aot_eager")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        forward(x, y).backward()
        optimizer.step()

    return step


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lengths", type=int, default=30)
    parser.add_argument("--timed", type=int, default=3, help="how many sizes are timed")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sizes = [([16, 24, 12, 8, 20][i % 5], 20 + 3 * i) for i in range(args.lengths)]
    step, symbolic = mirrored(args, None)
    by_torch = compiled_by_torch(args)
    first = {"mirrorc, dynamic=None": [], "torch.compile, dynamic=None": []}  # type: dict[str, list[float]]
    for size in sizes:
        x, y = batch(*size)
        for name, trainer in zip(first, (step, by_torch), strict=True):
            first[name].append(seconds(lambda trainer=trainer, x=x, y=y: trainer(x, y)))  # type: ignore[misc]
    print(f"{len(sizes)} sizes, {args.devices} devices, {args.backend}, torch {torch.__version__}")
    for name, took in first.items():
        long = [f"{one:.1f}" for one in took if one > 10 * statistics.median(took)]
        print(f"{name}: {sum(took):.1f} s for the first calls of all sizes; of these took long: {', '.join(long)} s")
    print(f"{symbolic!r}")
    static, _ = mirrored(args, False)
    for size in sizes[:: len(sizes) // args.timed][: args.timed]:
        x, y = batch(*size)
        took = seconds(lambda x=x, y=y: static(x, y))  # type: ignore[misc]
        times: dict[str, list[float]] = {"symbolic": [], "static": [], "torch.compile": []}
        turns = [("symbolic", step), ("static", static)]
        for turn in range(args.rounds):
            for name, trainer in turns if turn % 2 else reversed(turns):
                times[name].append(seconds(lambda trainer=trainer, x=x, y=y: trainer(x, y)))  # type: ignore[misc]
        times["torch.compile"] = [seconds(lambda x=x, y=y: by_torch(x, y)) for _ in range(args.rounds)]  # type: ignore[misc]
        median = {name: statistics.median(own) * 1e3 for name, own in times.items()}
        ratio = median["symbolic"] / median["static"]
        told = ", ".join(f"{name} {one:.2f} ms" for name, one in median.items())
        print(f"batch {size[0]} x {size[1]}: {told}; symbolic / static {ratio:.2f}; static compiled in {took:.1f} s")


if __name__ == "__main__":
    main()
