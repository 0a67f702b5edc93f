"""Trains a transformer on text of ragged lengths, on several devices: what kind of character has this Unicode name?

    python examples/ragged_names.py

A batch has names of similar length and is as long as its longest name: no two need to be of one size. The second size makes a
program for all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from lstm_names import KINDS, LETTERS, read_names
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import mirrorc


class NameTransformer(nn.Module):
    """Names [batch, letters], 0 where they have ended, to logits [batch, kinds]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS) + 1, width), nn.Embedding(64, width)
        self.mix = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, len(KINDS))

    def forward(self, names: torch.Tensor) -> torch.Tensor:
        is_letter = (names > 0).unsqueeze(2)
        hidden = self.mix(self.letters(names) + self.places(torch.arange(names.size(1), device=names.device)))
        return self.head((hidden * is_letter).sum(1) / is_letter.sum(1))


def batches(names: Sequence[tuple[str, int]], size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Names and their kinds, in batches of similar length, shuffled; the last one may be smaller."""
    order = sorted(torch.randperm(len(names)).tolist(), key=lambda i: len(names[i][0]))
    found = []
    for start in range(0, len(order), size):
        chosen = [names[i] for i in order[start : start + size]]
        rows = torch.zeros(len(chosen), max(len(name) for name, _ in chosen), dtype=torch.int64)
        for row, (name, _) in zip(rows, chosen, strict=True):
            row[: len(name)] = torch.tensor([LETTERS.index(letter) + 1 for letter in name])
        found.append((rows, torch.tensor([kind for _, kind in chosen])))
    return [found[i] for i in torch.randperm(len(found)).tolist()]


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the accuracy on names that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--per-kind", type=int, default=400)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    train, held_out = read_names(options.per_kind)
    model = NameTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend=options.backend),
    ) as step:
        for epoch in range(options.epochs):
            progress = tqdm(batches(train, options.batch), unit="step", dynamic_ncols=True)
            for rows, kinds in progress:
                progress.set_postfix_str(f"loss {float(step(rows, target=kinds)):.3f}, longest {rows.size(1)}")
            model.eval()
            with torch.no_grad():
                right = sum(
                    int((model(rows).argmax(1) == kinds).sum()) for rows, kinds in batches(held_out, options.batch)
                )
            model.train()
            found = right / len(held_out)
            print(f"epoch {epoch + 1}: held-out accuracy {found:.1%}")
    return found


if __name__ == "__main__":
    main()
