"""Trains a net on several devices that repeats a layer until its state has settled, which no compiled graph can.

python examples/settling_digits.py
python examples/settling_digits.py --devices cpu:0 cpu:1 cpu:2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import mirrorc

TOLERANCE = 0.01


class Settling(nn.Module):
    """Images [batch, 64] to logits [batch, 10], by a state that is computed anew until it changes no more."""

    def __init__(self, most_rounds: int = 20) -> None:
        super().__init__()
        self.given, self.again, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.most_rounds = most_rounds
        self.register_buffer("num_rounds", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        given = self.given(images)
        state = torch.zeros_like(given)
        for number in range(1, self.most_rounds + 1):
            before, state = state, (given + self.again(state)).tanh()
            self.num_rounds.fill_(number)
            if (state - before).abs().max() < TOLERANCE:  # how often that is depends on the images of a replica
                break
        return self.head(state)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the share of digits that are recognised, in 0 … 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = Settling()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        # forward and backward run as plain PyTorch; "auto" finds that out, and warns once
        compiler=mirrorc.Compiler(backend=options.backend, capture="autograd"),
    )
    with step:
        progress = tqdm(range(options.epochs), unit="epoch", dynamic_ncols=True)
        for _ in progress:
            for chosen in torch.randperm(len(images)).split(options.batch):
                loss = step(images[chosen], target=labels[chosen])
            progress.set_postfix_str(f"loss {float(loss):.3f}, {float(model.num_rounds):.1f} rounds")
        share = float((step.evaluate(images).argmax(1) == labels).float().mean())
    print(f"{share:.0%} of the digits are recognised")
    return share


if __name__ == "__main__":
    main()
