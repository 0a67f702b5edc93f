"""Models of several kinds: steps of programs with symbolic sizes beside those of programs for each size.

    python benchmarks/dynamic_models.py                         # all of them
    python benchmarks/dynamic_models.py convolutions perceptron --rounds 31

Each model has three sizes. With ``dynamic=None``, the first is compiled for itself, and the others run one program with symbols.
Of these two, steps of ``dynamic=None`` and ``dynamic=False`` are timed in turns, either of them first in every other turn, and
compared by their medians. First calls are told, too: most of that is compilation, of regions that may be in a cache of Inductor.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from dynamic import WORDS, Model, batch, seconds
from torch import nn
from torch.nn import functional as F
from workloads import ResNet

import mirrorc


class Convolutions(nn.Module):
    """Text to classes by convolutions over time, of which one halves it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, width), nn.Linear(2 * width, 16)
        self.wide, self.halving = nn.Conv1d(width, width, 5, padding=2), nn.Conv1d(width, 2 * width, 4, 2, 1)
        self.last = nn.Conv1d(2 * width, 2 * width, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.halving(F.gelu(self.wide(self.tokens(x).transpose(1, 2)))))
        return F.cross_entropy(self.head(F.relu(self.last(hidden)).mean(2)), y)


class WithLoss(nn.Module):
    """A classifier that gives its loss."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(x), y)


def perceptron() -> nn.Module:
    """Two hidden layers of 512, with a norm and dropout."""
    first = [nn.Linear(128, 512), nn.ReLU(), nn.LayerNorm(512)]
    return WithLoss(nn.Sequential(*first, nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 16)))


@dataclass(frozen=True)
class Kind:
    """A model, a batch of so many examples of so long, and three such sizes."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    sizes: tuple[tuple[int, int], ...]


def rows(num_examples: int, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_examples, 128), torch.randint(0, 16, (num_examples,))


def images(num_examples: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_examples, 3, side, side), torch.randint(0, 10, (num_examples,))


KINDS = {
    "convolutions": Kind(Convolutions, batch, ((16, 100), (16, 130), (24, 160))),
    "perceptron": Kind(perceptron, rows, ((128, 0), (256, 0), (512, 0), (384, 0))),
    "resnet": Kind(lambda: WithLoss(ResNet()), images, ((8, 32), (8, 24), (16, 40))),
    "transformer": Kind(lambda: Model(128, 2), batch, ((8, 40), (12, 50), (16, 70))),
}


def step_of(kind: Kind, args: argparse.Namespace, dynamic: bool | None) -> mirrorc.Step:
    torch.manual_seed(0)
    model = kind.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    devices = [f"cpu:{i}" for i in range(args.devices)]
    return mirrorc.compile(
        model,
        devices,
        optimizer=optimizer,
        compiler=mirrorc.Compiler(dynamic=dynamic),
        debug=mirrorc.Debug(progress=False),
    )


def compare(name: str, kind: Kind, args: argparse.Namespace) -> None:
    """Prints what first calls and steps of a model take, with symbols and without."""
    steps = {"symbolic": step_of(kind, args, None), "static": step_of(kind, args, False)}
    first: dict[str, list[str]] = {told: [] for told in steps}
    for size in kind.sizes:
        x, y = kind.make_batch(*size)
        for told, step in steps.items():
            first[told].append(f"{seconds(lambda step=step, x=x, y=y: step(x, y)):.1f}")  # type: ignore[misc]
    of_first = "; ".join(f"{told} {', '.join(took)}" for told, took in first.items())
    print(f"{name}: first calls of {kind.sizes}, s: {of_first}")
    for size in kind.sizes[-2:]:
        x, y = kind.make_batch(*size)
        times: dict[str, list[float]] = {told: [] for told in steps}
        for turn in range(args.rounds):
            for told in steps if turn % 2 else reversed(steps):
                times[told].append(seconds(lambda step=steps[told], x=x, y=y: step(x, y)))  # type: ignore[misc]
        symbolic, static = (statistics.median(own) * 1e3 for own in times.values())
        of_turns = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        print(
            f"  {size}: symbolic {symbolic:.2f} ms, static {static:.2f} ms; symbolic / static {symbolic / static:.2f}, "
            f"within a turn {of_turns:.2f}",
            flush=True,
        )
    for step in steps.values():
        step.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in args.kinds or KINDS:
        compare(name, KINDS[name], args)


if __name__ == "__main__":
    main()
