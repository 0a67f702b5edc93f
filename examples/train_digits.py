"""Trains a small convolutional net, with BatchNorm and dropout, on scikit-learn's handwritten digits, on several devices.

    python examples/train_digits.py                        # two logical CPUs
    python examples/train_digits.py --devices cpu:0 cpu:1 cpu:2

The last batch of an epoch is smaller and does not divide evenly; the step means the same all the same.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import mirrorc


class DigitNet(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(64)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(64 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.head(self.dropout(x.flatten(1)))


def load_data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, then held-out ones (a quarter)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, held_out = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    return images[train], labels[train], images[held_out], labels[held_out]


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The part of the images that the model names rightly."""
    model.eval()
    device = next(model.parameters()).device
    right = model(images.to(device)).argmax(1) == labels.to(device)
    model.train()
    return float(right.float().mean())


def main() -> None:
    """Trains, and prints the held-out accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    images, labels, held_out_images, held_out_labels = load_data(options.seed)
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    with mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend=options.backend),
    ) as step:
        step.prepare(images[: options.batch], target=labels[: options.batch])
        print(step.program)
        progress = tqdm(range(options.epochs), unit="epoch", dynamic_ncols=True)
        for _ in progress:
            for chunk in torch.randperm(len(labels)).split(options.batch):
                loss = step(images[chunk], target=labels[chunk])
            scheduler.step()
            found = accuracy(model, held_out_images, held_out_labels)
            progress.set_postfix_str(f"loss {float(loss):.3f}, held-out accuracy {found:.1%}")
    print(f"held-out accuracy {accuracy(model, held_out_images, held_out_labels):.1%}")
    print(f"all in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
