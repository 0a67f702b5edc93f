"""Trains a small GAN on scikit-learn's handwritten digits, on several devices: two optimizers, two steps, one set of networks.

python examples/gan_digits.py
python examples/gan_digits.py --devices cpu:0 cpu:1 cpu:2
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

NOISE = 16


def make_generator() -> nn.Module:
    """Noise [batch, 16] to images [batch, 64] in 0 … 1."""
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
    )


def make_critic() -> nn.Module:
    """Images [batch, 64] to logits [batch, 1], which are high for real ones."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )


class CriticLoss(nn.Module):
    """What the critic minimizes: it is to tell real images from made ones."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        made = self.generator(noise).detach()
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made)).mean()


class GeneratorLoss(nn.Module):
    """What the generator minimizes: its images are to pass as real."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.critic(self.generator(noise))).mean()


def picture(image: torch.Tensor) -> str:
    """An image [64] as text."""
    shades = " .:-=+*#%@"
    return "\n".join("".join(2 * shades[int(v * 9.99)] for v in row) for row in image.view(8, 8).tolist())


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, prints an image, and returns how far the mean of made images is from that of real ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    generator, critic = make_generator(), make_critic()
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for_generator = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    shared = {"devices": options.devices, "compiler": mirrorc.Compiler(backend=options.backend)}
    with (
        mirrorc.compile(CriticLoss(generator, critic), optimizer=for_critic, **shared) as train_critic,
        mirrorc.compile(GeneratorLoss(generator, critic), optimizer=for_generator, **shared) as train_generator,
    ):
        progress = tqdm(range(options.epochs), unit="epoch", dynamic_ncols=True)
        for _ in progress:
            for chosen in torch.randperm(len(images)).split(options.batch):
                loss = train_critic(torch.randn(len(chosen), NOISE), real=images[chosen])
                generator_loss = train_generator(torch.randn(len(chosen), NOISE))
            progress.set_postfix_str(f"critic {float(loss):.3f}, generator {float(generator_loss):.3f}")
    with torch.no_grad():
        made = generator(torch.randn(len(images), NOISE))
    print(picture(made[0]))
    distance = float((made.mean(0) - images.mean(0)).abs().mean())
    print(f"mean made and mean real image differ by {distance:.3f} a pixel, of 0 … 1")
    return distance


if __name__ == "__main__":
    main()
