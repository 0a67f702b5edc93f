"""Of a model with embedding tables, options of a step do what one device does, though only a step's rows are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_parameters
from selections import exhaustive, slow
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.runtime.state.shares import pieces

NUM_ROWS, WIDTH = 3000, 50


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_ROWS, WIDTH)
        self.places = nn.Embedding(NUM_ROWS + 7, WIDTH, padding_idx=3)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head((self.words(indices) * self.places(indices)).sum(1))


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a scaler of their own."""
    return options | ({"scaler": torch.amp.GradScaler("cpu", options["scaler"])} if "scaler" in options else {})


def batches(dtype: torch.dtype, bad: float | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    for i, size in enumerate((5, 8, 5, 8, 5)):
        indices = torch.randint(0, NUM_ROWS, (size, 4))
        indices[:, 0], indices[0, :2], indices[-1, 2] = 17, 3, NUM_ROWS - 1
        target = torch.randn(size, 2, dtype=dtype)
        if i == 2 and bad is not None:
            target[size // 2, 1] = bad
        yield indices, target


def trained_on_one_device(
    net: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any], bad: float | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    norms, scaler = [], given.get("scaler")
    for x, target in batches(dtype, bad):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), target)
        (loss if scaler is None else scaler.scale(loss)).backward()
        is_finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if "clip_grad_norm" in given:
            bound = given["clip_grad_norm"]
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), bound.max_norm, bound.norm_type))
        if "clip_grad_value" in given:
            nn.utils.clip_grad_value_(net.parameters(), given["clip_grad_value"])
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif is_finite or "check_finite" not in given:
            optimizer.step()
    return norms


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, 1.0), "clip_grad_value": 1e-5}, None),
        ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, math.inf), "check_finite": "skip"}, math.nan),
        ({"scaler": 2.0**6, "clip_grad_norm": mirrorc.ClipGradNorm(1e-2)}, math.nan),
        *slow(
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3)}, None),
            ({"clip_grad_value": 1e-3}, None),
            ({"check_finite": "skip"}, math.nan),
            ({"scaler": 2.0**6}, math.inf),
        ),
        *exhaustive(
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e6)}, None),
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3), "clip_grad_value": 1e-5}, None),
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, 3.0)}, None),
            ({"clip_grad_value": 1e-3, "check_finite": "skip"}, math.inf),
            ({"scaler": 3.0, "clip_grad_value": 1e-3}, math.nan),
        ),
    ],
)
@pytest.mark.parametrize(
    ("num_devices", "dtype"),
    [
        (2, torch.float64),
        *slow((3, torch.float32)),
        *exhaustive((1, torch.float64), (3, torch.float64), (2, torch.float32), (1, torch.float32)),
    ],
)
def test_steps_are_those_of_one_device(
    options: dict[str, Any], bad: float | None, num_devices: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    norms = []
    with Twins(Tables().to(dtype), make, F.mse_loss, num_devices, **given(options)) as pair:
        for x, target in batches(dtype, bad):
            pair.step(x, target=target)
            norms += [pair.step.grad_norm] if "clip_grad_norm" in options else []
        assert pair.step.num_skipped == (bad is not None)
        expected = trained_on_one_device(pair.twin, pair.twin_optimizer, given(options), bad, dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        for one, other in zip(norms, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=0.0, equal_nan=True, check_dtype=False)
        assert_same_parameters(pair.model, pair.twin, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 1e-3},
        {"scaler": 2.0**10},
        *slow(
            ({"clip_grad_value": 1e-3},),
            ({"clip_grad_norm": 1e6},),
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, math.inf)},),
            ({"check_finite": True},),
        ),
    ],
)
def test_no_share_of_a_table_is_looked_at_or_changed_as_a_whole(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a fused kernel write a scaled gradient back: what is behind the rows of a step stays as it is."""
    parts: list[int] = []
    visit = pieces.Visit.__call__

    def noting(one: pieces.Visit, part: torch.Tensor) -> None:
        parts.append(part.numel())
        visit(one, part)

    monkeypatch.setattr(pieces.Visit, "__call__", noting)
    net = Tables()
    divided: list[object] = []
    monkeypatch.setattr(
        mirrorc.runtime.state.optimizers.flat_optimizer,
        "dividing_gradients",
        lambda *args: divided.append(args) or pytest.fail("it writes the gradient"),
    )
    make = partial(torch.optim.AdamW, fused=True)
    with compiled_step(net, F.mse_loss, optimizer=make, **given(options)) as step:
        for x, target in batches(torch.float32, None):
            step(x, target=target)
            parts.append(0)
    of_later_steps = parts[parts.index(0) :]
    assert max(of_later_steps) <= 2 * 8 * 4 * WIDTH
