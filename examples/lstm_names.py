"""Trains an LSTM on ragged text, on several devices: what kind of character has this Unicode name?

    python examples/lstm_names.py

Names have 3 to 60 letters. A batch has names of similar length, padded to a multiple of 16, so that few shapes are compiled.
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from tqdm import tqdm

import mirrorc

KINDS = ("Lu", "Ll", "Lo", "Mn", "Nd", "Po", "Sm", "So")  # Unicode's general categories
LETTERS = " -0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NameNet(nn.Module):
    """Names [batch, letters], 0 where they have ended, and their lengths [batch], to logits [batch, kinds]."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS) + 1, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, len(KINDS))

    def forward(self, names: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(names), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(torch.cat([last[0], last[1]], 1))


def read_names(per_kind: int, seed: int = 0) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Names, each with the number of its kind: to train on, and held out (a quarter)."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for code in range(0x30000):
        name, kind = unicodedata.name(chr(code), ""), unicodedata.category(chr(code))
        if kind in found and 0 < len(name) <= 60 and "CJK UNIFIED" not in name and set(name) <= set(LETTERS):
            found[kind].append(name)
    generator = torch.Generator().manual_seed(seed)
    chosen = [
        (names[i], label)
        for label, names in enumerate(found.values())
        for i in torch.randperm(len(names), generator=generator)[:per_kind].tolist()
    ]
    order = torch.randperm(len(chosen), generator=generator).tolist()
    return [chosen[i] for i in order[len(order) // 4 :]], [chosen[i] for i in order[: len(order) // 4]]


def batches(names: Sequence[tuple[str, int]], size: int) -> list[Batch]:
    """Names, their lengths and their kinds, in batches of similar length, shuffled; the last one of a length may be smaller."""
    by_length: dict[int, list[tuple[str, int]]] = {}
    for i in torch.randperm(len(names)).tolist():
        by_length.setdefault(-(-len(names[i][0]) // 16) * 16, []).append(names[i])
    found = []
    for length, some in by_length.items():
        for start in range(0, len(some), size):
            chosen = some[start : start + size]
            rows = torch.zeros(len(chosen), length, dtype=torch.int64)
            for row, (name, _) in zip(rows, chosen, strict=True):
                row[: len(name)] = torch.tensor([LETTERS.index(letter) + 1 for letter in name])
            lengths = torch.tensor([len(name) for name, _ in chosen])
            found.append((rows, lengths, torch.tensor([kind for _, kind in chosen])))
    return [found[i] for i in torch.randperm(len(found)).tolist()]


def accuracy(step: mirrorc.Step, names: Sequence[tuple[str, int]], size: int) -> float:
    """The part of the names whose kind the model finds; forward runs on all devices."""
    right = 0
    for rows, lengths, kinds in batches(names, size):
        right += int((step.evaluate(rows, lengths).argmax(1) == kinds).sum())
    return right / len(names)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the accuracy on names that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--per-kind", type=int, default=400)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    train, held_out = read_names(options.per_kind)
    model = NameNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        clip_grad_norm=1.0,
        compiler=mirrorc.Compiler(backend=options.backend),
    ) as step:
        for epoch in range(options.epochs):
            progress = tqdm(batches(train, options.batch), unit="step", dynamic_ncols=True)
            for rows, lengths, kinds in progress:
                progress.set_postfix_str(f"loss {float(step(rows, lengths, target=kinds)):.3f}")
            model.eval()
            found = accuracy(step, held_out, options.batch)
            model.train()
            print(f"epoch {epoch + 1}: held-out accuracy {found:.1%}")
    return found


if __name__ == "__main__":
    main()
