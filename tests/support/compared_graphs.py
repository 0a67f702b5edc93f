"""Trains random graphs by one backend and compares them with plain PyTorch, many graphs in one compilation.

    python tests/support/compared_graphs.py 1000 5000              # 5,000 graphs, from seed 1000, 40 in a compilation
    python tests/support/compared_graphs.py 1000 5000 --together 20

Prints each graph that differs or fails, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from fuzzed_operators import drawn_graph
from torch import nn
from twins import compiled_step

TOGETHER = 40
_MINUTES = 10  # for one compilation


class Graphs(nn.Module):
    """Several graphs, each over an example and a parameter; gives the loss of each."""

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self.graphs = [[operator for _, operator in drawn_graph(seed)] for seed in seeds]
        values = [
            torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        self.weights = nn.ParameterList(map(nn.Parameter, values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for example, graph, weight in zip(x.unbind(), self.graphs, self.weights, strict=True):
            h = t = example * weight
            for operator in graph:
                t = operator(t, h)
            places = torch.arange(t.numel(), dtype=t.dtype).reshape(t.shape)
            losses.append((t.sin() * (places * 0.7).cos()).sum())
        return torch.stack(losses)


def differing_graphs(seeds: Sequence[int], backend: str = "inductor") -> dict[int, str]:
    """The seeds of graphs whose losses or gradients a backend computes otherwise than plain PyTorch, or that fail.

    Graphs of one compilation that fail are tried by halves; what differs among others is tried alone, too.
    """
    try:
        differing = _differing_graphs(seeds, backend)
    except Exception as error:  # noqa: BLE001 - it is what the graphs have led to
        if len(seeds) == 1:
            return {seeds[0]: f"{type(error).__name__}: {error}".splitlines()[0]}
        middle = len(seeds) // 2
        parts = [differing_graphs(part, backend) for part in (seeds[:middle], seeds[middle:])]
        return {**parts[0], **parts[1]} or {seeds[0]: f"fails among {list(seeds)}: {error}"}
    if len(seeds) == 1:
        return dict.fromkeys(differing, "differs")
    return {seed: differing_graphs([seed], backend).get(seed, f"differs among {list(seeds)}") for seed in differing}


def _loss(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (losses * weights).sum()


def _differing_graphs(seeds: Sequence[int], backend: str) -> list[int]:
    model = Graphs(seeds)
    before = [weight.detach().clone() for weight in model.weights]
    x = torch.randn(len(seeds), 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(len(seeds), dtype=torch.float64)
    expected = model(x)
    gradients = torch.autograd.grad(expected.sum(), list(model.weights), allow_unused=True)
    options = {"backend": backend, "return_outputs": True, "loss_reduction": "sum"}
    with compiled_step(model, _loss, 1, partial(torch.optim.SGD, lr=1.0), **options) as step:
        _, losses = step(x, ones)
    updates = [was - weight.detach() for was, weight in zip(before, model.weights, strict=True)]
    graphs = zip(seeds, losses, expected, updates, gradients, strict=True)
    return [seed for seed, *values in graphs if not (_are_close(*values[:2]) and _are_close(*values[2:]))]


def _are_close(actual: torch.Tensor, expected: torch.Tensor | None) -> bool:
    wanted = torch.zeros_like(actual) if expected is None else expected
    return torch.allclose(actual.detach(), wanted.detach(), rtol=1e-8, atol=1e-8, equal_nan=True)


def _compared(seeds: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Compares graphs in a process of their own, which a wrong kernel may end; then by halves."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_report, args=(seeds, results))
    process.start()
    process.join(60 * _MINUTES)
    if process.exitcode == 0:
        yield from results.get().items()
    elif len(seeds) == 1:
        process.kill()
        yield seeds[0], f"ends the process with {process.exitcode}"
    else:
        process.kill()
        middle = len(seeds) // 2
        yield from _compared(seeds[:middle])
        yield from _compared(seeds[middle:])


def _report(seeds: Sequence[int], results: multiprocessing.SimpleQueue[dict[int, str]]) -> None:
    results.put(differing_graphs(seeds))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="graphs")
    parser.add_argument("--together", type=int, default=TOGETHER, help="graphs in a compilation")
    options = parser.parse_args()
    started, num_differing, end = time.perf_counter(), 0, options.first + options.count
    for first in range(options.first, end, options.together):
        seeds = range(first, min(end, first + options.together))
        for seed, difference in _compared(seeds):
            num_differing += 1
            sys.stdout.write(f"{seed}: {difference}: {[name for name, _ in drawn_graph(seed)]}\n")
        minutes = (time.perf_counter() - started) / 60
        sys.stdout.write(f"{seeds.stop - options.first} graphs in {minutes:.1f} minutes, {num_differing} differ\n")
        sys.stdout.flush()
    return int(bool(num_differing))


if __name__ == "__main__":
    sys.exit(main())
