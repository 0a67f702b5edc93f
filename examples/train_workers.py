"""Trains on scikit-learn's digits, in one process or in several, and goes on from its last checkpoint when it is started again.

python examples/train_workers.py
torchrun --nproc-per-node=2 --max-restarts=3 examples/train_workers.py --checkpoints out/digits
torchrun --nproc-per-node=2 examples/train_workers.py --checkpoints out/digits --compression power-sgd
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from power_sgd import PowerSGD
from torch.nn import functional as F
from tqdm import tqdm
from train_digits import DigitNet, accuracy, load_data

import mirrorc

COMPRESSIONS = {
    "none": None,
    "bfloat16": "bfloat16",
    "top-k": mirrorc.TopK(0.05),
    "power-sgd": PowerSGD(2),
}


class Training:
    """A step with its scheduler, and the number of steps that it has made."""

    def __init__(self, options: argparse.Namespace, num_steps: int) -> None:
        self.model = DigitNet().to(getattr(torch, options.dtype))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        self.num_steps = 0  # it also says where in the data the next step begins
        self.step = mirrorc.compile(
            self.model,
            options.devices,
            optimizer=optimizer,
            loss_fn=F.cross_entropy,
            communication=mirrorc.Communication(compression=COMPRESSIONS[options.compression], timeout=options.timeout),
            compiler=mirrorc.Compiler(backend=options.backend),
        )

    def save(self, folder: Path) -> None:
        """Replaces the checkpoint; all workers call it. A process may end at any moment: one of the two is whole."""
        mirrorc.save_checkpoint(self.step, folder, scheduler=self.scheduler, num_steps=self.num_steps)

    def load(self, folder: Path) -> None:
        self.num_steps = mirrorc.load_checkpoint(self.step, folder, scheduler=self.scheduler)["num_steps"]


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the held-out accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="of each worker")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all workers see")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a worker waits for others at most")
    parser.add_argument("--compression", choices=list(COMPRESSIONS), default="none", help="of what workers send")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images, labels, held_out_images, held_out_labels = load_data(0)
    dtype, per_epoch = getattr(torch, options.dtype), -(-len(labels) // options.batch)
    num_steps = options.epochs * per_epoch
    training = Training(options, num_steps)
    with training.step as step:
        if options.checkpoints:
            with contextlib.suppress(FileNotFoundError):  # the first start
                training.load(options.checkpoints / "last")
        progress = tqdm(total=num_steps, initial=training.num_steps, disable=not step.is_chief, dynamic_ncols=True)
        while training.num_steps < num_steps:
            epoch, begin = divmod(training.num_steps, per_epoch)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
            for chosen in order.split(options.batch)[begin:]:
                own = step.shard_batch(chosen)
                step(images[own].to(dtype), target=labels[own])
                training.scheduler.step()
                training.num_steps += 1
                progress.update()
                is_due = training.num_steps % options.save_every == 0 or training.num_steps == num_steps
                if is_due and options.checkpoints:
                    training.save(options.checkpoints / "last")
    found = accuracy(training.model, held_out_images.to(dtype), held_out_labels)
    if step.is_chief:
        print(f"held out: accuracy {found:.1%}")
    return found


if __name__ == "__main__":
    main()
