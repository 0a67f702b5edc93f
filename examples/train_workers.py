"""Trains on scikit-learn's digits, in one process or in several, and goes on from its last checkpoint when it is started again.

python examples/train_workers.py
torchrun --nproc-per-node=2 --max-restarts=3 examples/train_workers.py --checkpoints out/digits
torchrun --nproc-per-node=2 examples/train_workers.py --checkpoints out/digits --compression power-sgd
"""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from power_sgd import PowerSGD
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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


class Checkpoints:
    """A folder with a directory for each saved step, and a file that names the last one that is whole.

    A process may end at any moment: what that file names was written before, every byte of it, and is not written again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._pointer = folder, folder / "last"

    @property
    def last(self) -> Path | None:
        """The last checkpoint; None if there is none."""
        return self._folder / self._pointer.read_text() if self._pointer.exists() else None

    def save_part(self, number: int, rank: int, part: dict[str, Any]) -> None:
        """Saves what one worker alone has after so many steps; all do so before one of them saves the state."""
        parts = self._folder / f"parts-{number}"
        parts.mkdir(parents=True, exist_ok=True)
        unfinished = parts / f"{rank}.unfinished"
        torch.save(part, unfinished)
        _sync(unfinished)
        os.replace(unfinished, parts / f"{rank}.pt")

    def parts(self) -> list[dict[str, Any]]:
        """What each worker alone had in the last checkpoint; empty if they had nothing."""
        own = self.last / "parts" if self.last is not None else None
        if own is None or not own.exists():
            return []
        first = torch.load(own / "0.pt")
        return [first, *(torch.load(own / f"{rank}.pt") for rank in range(1, first["num_workers"]))]

    def save(self, number: int, state: dict[str, Any]) -> None:
        """Saves the state after so many steps; one process alone does."""
        before, unfinished, whole = self.last, self._folder / "unfinished", self._folder / f"step-{number}"
        for left in {unfinished, whole} - {before}:  # by a start that ended while it saved
            shutil.rmtree(left, ignore_errors=True)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(unfinished, sync_files=True), no_dist=True)
        parts = self._folder / f"parts-{number}"
        if parts.exists():
            _sync(parts)
            os.rename(parts, unfinished / "parts")
        _sync(unfinished)
        os.rename(unfinished, whole)
        named = self._folder / "last.unfinished"
        named.write_text(whole.name)
        for written in (named, self._folder):
            _sync(written)
        os.replace(named, self._pointer)
        _sync(self._folder)
        for old in set(self._folder.glob("step-*")) - {before, whole}:
            shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a directory, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


class Training:
    """All that a checkpoint has: it is the same on all workers, so one of them saves it, and all load it.

    What workers have not sent of gradients differs: each saves its own, and all load all of them.
    """

    def __init__(self, options: argparse.Namespace, num_steps: int) -> None:
        self.model = DigitNet().to(getattr(torch, options.dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, num_steps)
        self.num_steps = 0  # that are made; it says, too, where in the data the next one begins
        self.step = mirrorc.compile(
            self.model,
            options.devices,
            optimizer=self.optimizer,
            loss_fn=F.cross_entropy,
            communication=mirrorc.Communication(compression=COMPRESSIONS[options.compression], timeout=options.timeout),
            compiler=mirrorc.Compiler(backend=options.backend),
        )
        self.keeps_gradients = options.compression in ("top-k", "power-sgd")
        self.cluster = mirrorc.cluster.join(timeout_seconds=options.timeout)  # the step's own
        self._seconds = options.timeout

    def save(self, checkpoints: Checkpoints) -> None:
        """Saves a checkpoint; all workers call it."""
        if self.keeps_gradients:
            checkpoints.save_part(self.num_steps, self.step.rank, self.step.unsent_state())
            self.cluster.all_say("its part is saved", timeout_seconds=self._seconds)
        if self.step.is_chief:  # the others wait for it in the next step
            checkpoints.save(self.num_steps, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        of_others = {"scheduler": self.scheduler.state_dict(), "step": self.step.state_dict()}
        numbers = {"num_steps": self.num_steps, "random": torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, **of_others, **numbers}

    def load(self, checkpoint: Path, parts: Sequence[dict[str, Any]]) -> None:
        """Goes back to a checkpoint, and to what each worker alone had in it."""
        state = self.state_dict()
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        own, moments = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=own, optim_state_dict=moments)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step.load_state_dict(state["step"])
        self.num_steps = state["num_steps"]
        torch.set_rng_state(state["random"])
        if parts:
            self.step.load_unsent_states(parts)


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
    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled"
    )  # it saves and loads in one process, as it is told
    torch.manual_seed(0)
    images, labels, held_out_images, held_out_labels = load_data(0)
    dtype, per_epoch = getattr(torch, options.dtype), -(-len(labels) // options.batch)
    num_steps = options.epochs * per_epoch
    training = Training(options, num_steps)
    checkpoints = Checkpoints(options.checkpoints) if options.checkpoints else None
    with training.step as step:
        if checkpoints is not None and checkpoints.last is not None:
            training.load(checkpoints.last, checkpoints.parts())
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
                if is_due and checkpoints is not None:
                    training.save(checkpoints)
    found = accuracy(training.model, held_out_images.to(dtype), held_out_labels)
    if step.is_chief:
        print(f"held out: accuracy {found:.1%}")
    return found


if __name__ == "__main__":
    main()
