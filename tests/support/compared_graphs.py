"""Trains random graphs by one backend and compares them with plain PyTorch, many graphs in one compilation.

    python tests/support/compared_graphs.py 1000 5000              # 5,000 graphs, from seed 1000, 40 in a compilation
    python tests/support/compared_graphs.py 1000 5000 --together 20
    python tests/support/compared_graphs.py 1000 50 --optimized    # by the kernels that users get

Prints each graph that differs or fails, and exits with 1 if there is one. One core compares about 80 graphs a minute: kernels
are not optimized, and those of every fourth compilation are vectorized.
"""

import argparse
import gc
import multiprocessing
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial

import torch
from fuzzed_operators import drawn_graph
from torch import nn
from twins import compiled_step

TOGETHER = 40
_ONE_VECTORIZED_OF = 4


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


Comparison = Callable[[Sequence[int]], dict[int, str]]
"""Gives a description of each graph, by its seed, that differs."""


def compared_in_processes(seeds: Sequence[int], comparison: Comparison, minutes: float = 10) -> dict[int, str]:
    """Compares graphs in a forked process, which a wrong kernel may end; then by halves, each in another process."""
    differing = _compared_in_a_process(seeds, comparison, minutes)
    if isinstance(differing, dict):
        return differing
    if len(seeds) == 1:
        return {seeds[0]: differing}
    middle = len(seeds) // 2
    halves = (compared_in_processes(half, comparison, minutes) for half in (seeds[:middle], seeds[middle:]))
    return dict(ChainMap(*halves)) or {seeds[0]: f"{differing} among {list(seeds)}"}


def _compared_in_a_process(seeds: Sequence[int], comparison: Comparison, minutes: float) -> dict[int, str] | str:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(comparison(seeds)))
    process.start()
    sender.close()  # so that the end of the process ends the wait
    try:
        if not receiver.poll(60 * minutes):
            return f"takes more than {minutes} minutes"
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return f"ends the process with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _quickly_compared(seeds: Sequence[int], are_vectorized: bool) -> dict[int, str]:
    from joined_kernels import vectorize

    vectorize(are_vectorized)
    return differing_graphs(seeds)


def _prepare() -> None:
    """Lets forked processes begin with what a first compilation prepares, and without collections of garbage."""
    from joined_kernels import join_kernels

    join_kernels()
    for are_vectorized in (True, False):
        _quickly_compared([0], are_vectorized)
    gc.disable()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="graphs")
    parser.add_argument("--together", type=int, default=TOGETHER, help="graphs in a compilation")
    parser.add_argument("--optimized", action="store_true", help="kernels as users get them, which take 3 s a graph")
    options = parser.parse_args()
    if not options.optimized:
        _prepare()
    started, num_differing, end = time.perf_counter(), 0, options.first + options.count
    for first in range(options.first, end, options.together):
        seeds = range(first, min(end, first + options.together))
        are_vectorized = first // options.together % _ONE_VECTORIZED_OF == 0
        comparison = (
            differing_graphs if options.optimized else partial(_quickly_compared, are_vectorized=are_vectorized)
        )
        for seed, difference in compared_in_processes(seeds, comparison).items():
            num_differing += 1
            sys.stdout.write(f"{seed}: {difference}: {[name for name, _ in drawn_graph(seed)]}\n")
        minutes = (time.perf_counter() - started) / 60
        sys.stdout.write(f"{seeds.stop - options.first} graphs in {minutes:.1f} minutes, {num_differing} differ\n")
        sys.stdout.flush()
    return int(bool(num_differing))


if __name__ == "__main__":
    sys.exit(main())
