"""Models with `torch.utils.checkpoint` train as those without, bit for bit, and take less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from references import Trained, assert_same_training, train_mirrored, train_on_one_device
from selections import exhaustive, slow
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirrorc

ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Deep(nn.Module):
    def __init__(self, *, checkpoints: bool, plain: bool = False, width: int = 6, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        between = [] if plain else [nn.Dropout(0.4)]
        after = [] if plain else [nn.BatchNorm1d(width)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), *between, nn.Linear(8 * width, width), *after)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.head(x)


def batches(*sizes: int, width: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(size, width, dtype=torch.float64, generator=generator),
            "target": torch.randint(3, (size,), generator=generator),
        }
        for size in sizes
    ]


def train(num_devices: int, sizes: tuple[int, ...] = (7, 7, 7), **options: Any) -> list[Trained]:
    found = []
    for checkpoints in (True, False):
        model = Deep(checkpoints=checkpoints)
        torch.manual_seed(1)
        found.append(train_mirrored(model, ADAMW, batches(*sizes), num_devices, F.cross_entropy, **options))
    return found


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    others = other.model.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in one.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (3, {"bucket_cap_mb": 0.002, "first_bucket_mb": 0.002}),
        *slow(
            (2, {"microbatches": 2}),
            (1, {}),
            (2, {}),
            (2, {"exact_order": True}),
            (2, {"clip_grad_norm": 0.1, "check_finite": True}),
        ),
    ],
)
def test_the_bits_are_those_without_checkpoints(num_devices: int, options: dict[str, Any]) -> None:
    assert_same_bits(*train(num_devices, **options))


@pytest.mark.parametrize("num_devices", [*slow((2,)), *exhaustive((1,), (3,))])
def test_compiled_steps_are_those_without_checkpoints(num_devices: int) -> None:
    one, other = train(num_devices, backend="inductor")
    assert one.losses == pytest.approx(other.losses, rel=1e-12)
    others = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, others[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_devices", [*slow((1,), (2,)), 3])
def test_training_is_that_of_one_device(num_devices: int) -> None:
    model = Deep(checkpoints=True, plain=True)
    reference = train_on_one_device(model, ADAMW, batches(7, 7), F.cross_entropy)
    assert_same_training(
        train_mirrored(model, ADAMW, batches(7, 7), num_devices, F.cross_entropy), reference, tolerance=1e-12
    )


def activations(*, checkpoints: bool, backend: str) -> int:
    (batch,) = batches(256, width=32)
    model = Deep(checkpoints=checkpoints, width=32, num_blocks=4)
    options: Any = {"optimizer": ADAMW(model.parameters()), "loss_fn": F.cross_entropy, "backend": backend}
    with mirrorc.compile(model, 1, **options) as step:
        step.prepare(**batch)
        return step.memory().activations


@pytest.mark.parametrize("backend", ["eager", *slow(("inductor",))])
def test_checkpoints_save_memory(backend: str) -> None:
    """Of four blocks, one is there at a time."""
    with_them, without = (activations(checkpoints=checkpoints, backend=backend) for checkpoints in (True, False))
    assert with_them < without / 2


@pytest.mark.slow
def test_an_evaluation_is_that_of_the_model() -> None:
    model, (batch,) = Deep(checkpoints=True), batches(5)
    options: Any = {"optimizer": ADAMW(model.parameters()), "loss_fn": F.cross_entropy, "backend": "eager"}
    with mirrorc.compile(model, 2, **options) as step:
        step(**batch)
        model.eval()
        found = step.evaluate(**batch)
        with torch.no_grad():
            torch.testing.assert_close(found, F.cross_entropy(model(batch["x"]), batch["target"]), rtol=1e-12, atol=0)
