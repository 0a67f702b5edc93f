"""Models with `torch.utils.checkpoint` train as those without, bit for bit, and take less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deep import Deep
from references import (
    Trained,
    assert_same_bits,
    assert_trains_alike,
    train_mirrored,
)
from selections import exhaustive, slow
from torch.nn import functional as F
from twins import batches_of, compiled_step

from mirrorc.packing import ByBytes

ADAMW = partial(torch.optim.AdamW, lr=0.01)


def train(num_devices: int, **options: Any) -> list[Trained]:
    found = []
    for num_own in (2, 0):
        model, given = Deep(num_blocks=2, num_own=num_own), batches_of(7, 7, 7, classes=3)
        torch.manual_seed(1)
        found.append(train_mirrored(model, ADAMW, given, num_devices, F.cross_entropy, **options))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (3, {"buckets": ByBytes(0.002, 0.002)}),
        (2, {"microbatches": 2}),
        (1, {}),
        (2, {}),
        (2, {"exact_order": True}),
        (2, {"clip_grad_norm": 0.1, "check_finite": True}),
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
    model = Deep(num_own=3, is_plain=True)
    assert_trains_alike(model, ADAMW, batches_of(7, 7, classes=3), num_devices, F.cross_entropy)


def activations(num_own: int, backend: str) -> int:
    (batch,) = batches_of(256, features=32, classes=3)
    with compiled_step(Deep(32, 4, num_own), F.cross_entropy, 1, backend=backend) as step:
        step.prepare(**batch)
        return step.memory().activations


@pytest.mark.parametrize("backend", ["eager", *slow(("inductor",))])
def test_checkpoints_save_memory(backend: str) -> None:
    """Of four blocks, one is there at a time."""
    assert activations(4, backend) < activations(0, backend) / 2


@pytest.mark.slow
def test_an_evaluation_is_that_of_the_model() -> None:
    model, (batch,) = Deep(num_own=3), batches_of(5, classes=3)
    with compiled_step(model, F.cross_entropy, optimizer=ADAMW) as step:
        step(**batch)
        model.eval()
        with torch.no_grad():
            expected = F.cross_entropy(model(batch["x"]), batch["target"])
        torch.testing.assert_close(step.evaluate(**batch), expected, rtol=1e-12, atol=0)
