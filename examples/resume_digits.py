"""Trains on scikit-learn's digits, stops half-way, and goes on from the checkpoint in new objects: bit for bit the same.

python examples/resume_digits.py                       # writes a checkpoint into a temporary folder
python examples/resume_digits.py --checkpoint checkpoint
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm
from train_digits import DigitNet, load_data

import mirrorc


class Training:
    """A model, its step, its scheduler, and the epochs that it has behind it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = DigitNet()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
        self.step = mirrorc.compile(
            self.model,
            options.devices,
            optimizer=optimizer,
            loss_fn=F.cross_entropy,
            compiler=mirrorc.Compiler(backend=options.backend),
        )
        self.batch, self.epoch = options.batch, 0

    def save(self, path: Path) -> None:
        """Writes a checkpoint, with the random numbers that shuffle the data and seed dropout."""
        mirrorc.save_checkpoint(self.step, path, scheduler=self.scheduler, epoch=self.epoch)

    def load(self, path: Path) -> None:
        """Goes back to a checkpoint. It may come before the first step, or between two."""
        self.epoch = mirrorc.load_checkpoint(self.step, path, scheduler=self.scheduler)["epoch"]

    def run(self, until: int) -> None:
        """Trains until some epochs are behind it."""
        images, labels, *_ = load_data(0)
        for _ in tqdm(range(self.epoch, until), unit="epoch", dynamic_ncols=True):
            for chosen in torch.randperm(len(labels)).split(self.batch):
                self.step(images[chosen], target=labels[chosen])
            self.scheduler.step()
            self.epoch += 1


def main(arguments: Sequence[str] | None = None) -> bool:
    """Trains in one go and in two, and returns whether the models are equal bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = options.checkpoint or Path(folder) / "checkpoint"
        whole = Training(options)
        with whole.step:
            whole.run(options.epochs // 2)
            whole.save(path)
            whole.run(options.epochs)
        torch.manual_seed(1)  # another process would begin anywhere
        resumed = Training(options)
        with resumed.step:
            resumed.load(path)
            resumed.run(options.epochs)
    own, other = whole.model.state_dict(), resumed.model.state_dict()
    is_equal = all(torch.equal(own[name], other[name]) for name in own)
    print(f"after {options.epochs} epochs, in one go and resumed: {'equal bit for bit' if is_equal else 'not equal'}")
    return is_equal


if __name__ == "__main__":
    main()
