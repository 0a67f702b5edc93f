"""Probes of what Inductor makes for a GPU: small nets of each kind, eager beside Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from gpu_probes.probe import Figures, Scene, add_probe, expect
from mirrorc.options.table import grouped

_SECONDS = 120.0
_TOLERANCES = {
    torch.float32: 2e-3,
    torch.bfloat16: 0.1,
}  # of the losses of five steps, whose products are rounded otherwise


class Attention(nn.Module):
    """Self-attention over rows of width 32, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).mean(1))


class HostConstant(nn.Module):
    """Multiplies by a number of the host's, which is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.constant = nn.Linear(32, 4), torch.tensor(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.constant


class Rows(nn.Module):
    """Two embeddings, one of them of bags."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags, self.out = nn.Embedding(100, 32), nn.EmbeddingBag(50, 32), nn.Linear(32, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(rows).mean(1) + self.tags(rows % 50))


def _vectors(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, 32).to(dtype)


@dataclass(frozen=True)
class Net:
    """A net and what it takes."""

    make: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.dtype], torch.Tensor]


NETS = {
    "host-constant": Net(HostConstant, _vectors),
    "batchnorm": Net(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)), _vectors
    ),
    "dropout": Net(lambda: nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 4)), _vectors),
    "attention": Net(Attention, lambda n, dtype: torch.randn(n, 16, 32).to(dtype)),
    "embeddings": Net(Rows, lambda n, dtype: torch.randint(0, 100, (n, 8))),
}


def losses_of(scene: Scene, net: Net, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The losses of five steps on two logical devices; the same numbers each time."""
    torch.manual_seed(0)
    model = net.make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "backend": backend}
    with mirrorc.compile(model, scene.logical(2), optimizer=optimizer, **grouped(options)) as step:
        return torch.stack([step(net.make_batch(16, dtype), target=torch.randint(0, 4, (16,))).cpu() for _ in range(5)])


def against_eager(scene: Scene, name: str) -> Figures:
    """Losses with Inductor are those without, in each dtype."""
    distances: dict[str, float] = {}
    for dtype, most in _TOLERANCES.items():
        if name == "host-constant" and dtype is not torch.float32:
            continue  # a product with a number of another dtype has that dtype
        found, wanted = (losses_of(scene, NETS[name], dtype, backend).double() for backend in ("inductor", "eager"))
        distance = float((found - wanted).abs().max())
        expect(bool(found.isfinite().all()), f"{dtype}: losses are {found.tolist()}")
        expect(distance < most, f"{dtype}: losses with Inductor differ by {distance:.3g} from those without")
        distances[f"distance {str(dtype).removeprefix('torch.')}"] = distance
    return distances


def add() -> None:
    """Adds these probes."""
    for name in NETS:
        add_probe("correctness", name, functools.partial(against_eager, name=name), _SECONDS)
