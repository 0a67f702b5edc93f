"""The models and batches that the benchmarks train."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from kinds_of_models import Depthwise, Gated, Norms, Patches, Recurrent, UpAndDown
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_text import GPT, GPTConfig, next_byte_loss


@dataclass(frozen=True)
class Workload:
    """A model, its loss, and a batch for so many examples."""

    name: str
    make_model: Callable[[], nn.Module]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    make_batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    per_replica: int


def make_mlp() -> nn.Module:
    """25.2 M parameters: 6 x Linear(2048, 2048) with ReLU, Linear(2048, 10)."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def make_gpt() -> nn.Module:
    """A byte-level GPT of 6 layers, width 384, 6 heads, 128 tokens."""
    return GPT(GPTConfig(num_layers=6, num_heads=6, width=384, context=128))


def make_word_model(num_words: int, *, is_tied: bool) -> nn.Module:
    """A GPT over many words: 2 layers, width 256, 4 heads, 64 tokens; tied: its output has the embedding's weight."""
    model = GPT(GPTConfig(num_layers=2, num_heads=4, width=256, context=64, vocabulary=num_words))
    if is_tied:
        model.head.weight = model.embedding.weight
    return model


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to the input (projected where sizes differ)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.project = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.project(x))


class ResNet(nn.Module):
    """A small ResNet for 32x32 images: three stages of two blocks, 32, 64 and 128 channels."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        shapes = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in shapes))
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(h.mean((2, 3)))


class BasicBlock(nn.Module):
    """Two normalized 3x3 convolutions, added to the input (projected and normalized where sizes differ)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        projection = (nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        self.project = nn.Identity() if stride == 1 else nn.Sequential(*projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.project(x))


class ResNet18(nn.Module):
    """The ResNet of 18 layers (He et al., 2016) for images of any size: 11.7 M parameters."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        shapes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        shapes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(BasicBlock(*shape) for shape in shapes))
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(self.blocks(h).mean((2, 3)))


class Recommender(nn.Module):
    """Embedding tables of 1 M rows together, and a small network on what is looked up: 32.1 M parameters."""

    def __init__(self, num_tables: int = 8, num_rows: int = 125_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(num_rows, width) for _ in range(num_tables))
        self.head = nn.Sequential(
            nn.Linear(num_tables * width, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [table(rows[:, i]) for i, table in enumerate(self.tables)]
        return self.head(torch.cat(found, 1)).squeeze(1)


def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 2048), torch.randint(0, 10, (n,))


def _images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))


def _photos(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 224, 224), torch.randint(0, 1000, (n,))


def _text(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 256, (n, 128)), torch.randint(0, 256, (n, 128))


def _words(num_words: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, num_words, (n, 64)), torch.randint(0, num_words, (n, 64))


def _word_workload(num_thousands: int, *, is_tied: bool) -> Workload:
    num_words = 1000 * num_thousands
    name = f"words-{num_thousands}k" + ("-tied" if is_tied else "")
    make_model = functools.partial(make_word_model, num_words, is_tied=is_tied)
    return Workload(name, make_model, next_byte_loss, functools.partial(_words, num_words), 16)


def _clicks(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 125_000, (n, 8)), torch.randint(0, 2, (n,)).float()


def _bytes(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 256, (n, 50)), torch.randint(0, 10, (n,))


def _pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 32, 32), torch.randn(n, 3, 32, 32)


def _four(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 4), torch.randn(n, 4)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp-64", make_mlp, F.cross_entropy, _vectors, 64),
        Workload("mlp-8", make_mlp, F.cross_entropy, _vectors, 8),
        Workload("gpt-8", make_gpt, next_byte_loss, _text, 8),
        *(_word_workload(thousands, is_tied=is_tied) for thousands in (16, 50) for is_tied in (True, False)),
        Workload("resnet-16", ResNet, F.cross_entropy, _images, 16),
        Workload("resnet18-4", ResNet18, F.cross_entropy, _photos, 4),
        Workload("lstm-32", Recurrent, F.cross_entropy, _bytes, 32),
        Workload("norms-16", Norms, F.cross_entropy, _images, 16),
        Workload("patches-16", Patches, F.cross_entropy, _images, 16),
        Workload("depthwise-16", Depthwise, F.cross_entropy, _images, 16),
        Workload("unet-8", UpAndDown, F.mse_loss, _pairs, 8),
        Workload("gated-16", Gated, F.cross_entropy, _bytes, 16),
        Workload("recommender-256", Recommender, F.binary_cross_entropy_with_logits, _clicks, 256),
        Workload("tiny", lambda: nn.Linear(4, 4), F.mse_loss, _four, 2),
    )
}
