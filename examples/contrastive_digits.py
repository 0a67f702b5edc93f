"""Trains two encoders to match the halves of handwritten digits, each among those of the whole batch, on several devices.

python examples/contrastive_digits.py
python examples/contrastive_digits.py --devices cpu:0 cpu:1 cpu:2
torchrun --nproc-per-node=2 examples/contrastive_digits.py     # two workers with two devices each: the batch is that of both
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

TEMPERATURE = 0.1


def make_encoder() -> nn.Module:
    """Halves of images [batch, 32] to embeddings [batch, 16]."""
    return nn.Sequential(nn.Linear(32, 128), nn.SyncBatchNorm(128), nn.ReLU(), nn.Linear(128, 16))


class Contrastive(nn.Module):
    """Upper and lower halves of images to the loss of matching them, each with one half among all of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = make_encoder(), make_encoder()

    def embeddings(self, upper: torch.Tensor, lower: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings of both halves, [batch, 16] of length 1."""
        return F.normalize(self.upper(upper), dim=1), F.normalize(self.lower(lower), dim=1)

    def forward(self, upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        a, b = self.embeddings(upper, lower)
        to_lower = (a @ mirrorc.all_gather(b).T / TEMPERATURE).logsumexp(1)  # own rows against those of all replicas
        to_upper = (b @ mirrorc.all_gather(a).T / TEMPERATURE).logsumexp(1)
        together = (a * b).sum(1) / TEMPERATURE
        return ((to_lower + to_upper) / 2 - together).mean()


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns how often the lower half of an image is found among those of 64, in 0 … 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    upper, lower = (torch.tensor(load_digits().data, dtype=torch.float32) / 16).split(32, dim=1)
    model = Contrastive()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with mirrorc.compile(
        model, devices=options.devices, optimizer=optimizer, compiler=mirrorc.Compiler(backend=options.backend)
    ) as step:
        progress = tqdm(range(options.epochs), unit="epoch", dynamic_ncols=True, disable=not step.is_chief)
        for _ in progress:
            for chosen in torch.randperm(len(upper)).split(options.batch):
                loss = step(*step.shard_batch((upper[chosen], lower[chosen])))
            progress.set_postfix_str(f"loss {float(loss):.3f}")
    model.eval()
    with torch.no_grad():
        a, b = model.embeddings(upper, lower)
    own = torch.arange(64)
    found = [(x @ y.T).argmax(1) == own[: len(x)] for x, y in zip(a.split(64), b.split(64), strict=True)]
    share = float(torch.cat(found).float().mean())
    if step.is_chief:
        print(f"the lower half of an image is found among those of 64 in {share:.0%} of all cases")
    return share


if __name__ == "__main__":
    main()
