"""Trains on scikit-learn's digits, in one process or in several, and goes on from its last checkpoint when it is started again.

python examples/train_workers.py
torchrun --nproc-per-node=2 --max-restarts=3 examples/train_workers.py --checkpoints out/digits
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm
from train_digits import DigitNet, accuracy, load_data

import mirrorc


def save(path: Path, state: dict[str, object]) -> None:
    """Writes a checkpoint that is there whole or not at all, whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the held-out accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="of each worker")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all workers see")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    cluster = mirrorc.cluster.join()
    torch.manual_seed(0)  # the same on all workers: they shuffle alike
    images, labels, held_out_images, held_out_labels = load_data(0)
    model = DigitNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = options.checkpoints / "last.pt" if options.checkpoints else None
    first = 0
    if path is not None and path.exists():
        state = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["epoch"]
        torch.set_rng_state(state["random"])
    with mirrorc.compile(
        model, options.devices, optimizer=optimizer, loss_fn=F.cross_entropy, backend=options.backend
    ) as step:
        for epoch in tqdm(range(first, options.epochs), unit="epoch", disable=not step.is_chief, dynamic_ncols=True):
            for chosen in torch.randperm(len(labels)).split(options.batch):
                own = step.shard_batch(chosen)
                step(images[own], target=labels[own])
            scheduler.step()
            if path is not None and cluster.should_checkpoint:
                state = {name: part.state_dict() for name, part in parts.items()}
                save(path, {**state, "epoch": epoch + 1, "random": torch.get_rng_state()})
    found = accuracy(model, held_out_images, held_out_labels)
    if cluster.is_chief:
        print(f"held out: accuracy {found:.1%}")
    return found


if __name__ == "__main__":
    main()
