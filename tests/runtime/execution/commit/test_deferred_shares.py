"""Products that are made behind the commit are what would be made before it, and nobody looks at them too soon."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.runtime.execution.binding import binder
from mirrorc.runtime.state.shares.lazy_pieces import UnmadePieces

OPTIMIZERS: dict[str, Any] = {
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
}


def trained(optimizer: str, num_devices: int, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Norms and parameters of four steps, of which the third is not finite if that is checked."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3)).to(dtype)
    found: list[torch.Tensor] = []
    if "scaler" in options:
        options = options | {"scaler": torch.amp.GradScaler("cpu", init_scale=options["scaler"])}
    made = OPTIMIZERS[optimizer](net.parameters())
    with mirrorc.compile(net, num_devices, optimizer=made, loss_fn=F.mse_loss, backend="eager", **options) as step:
        for i, size in enumerate((4, 5, 4, 5)):
            x, target = torch.randn(size, 400, dtype=dtype), torch.randn(size, 3, dtype=dtype)
            target[3, 2] = math.nan if i == 2 and ("check_finite" in options or "scaler" in options) else 1.0
            step(x, target=target)
            found += [step.grad_norm] if "clip_grad_norm" in options else []
    return [*found, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize(
    ("options", "is_left"),
    [
        ({"clip_grad_norm": 0.02, "check_finite": "skip"}, True),
        pytest.param({"clip_grad_norm": 1e6, "microbatches": 2}, True, marks=pytest.mark.slow),
        pytest.param({"check_finite": "skip"}, True, marks=pytest.mark.slow),
        pytest.param({"scaler": 1024.0}, True, marks=pytest.mark.slow),
        ({"scaler": 1024.0, "clip_grad_norm": 0.02}, True),
        pytest.param({"clip_grad_norm": 0.02, "exact_order": True}, False, marks=pytest.mark.slow),
        pytest.param({"clip_grad_norm": mirrorc.ClipGradNorm(0.1, math.inf)}, False, marks=pytest.mark.slow),
        pytest.param({"clip_grad_value": 0.001, "check_finite": "skip"}, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("optimizer", ["fused", pytest.param("foreach", marks=pytest.mark.exhaustive)])
def test_what_is_made_late_is_what_would_be_made_at_once(
    options: dict[str, Any], is_left: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[UnmadePieces] = []
    leave = binder.LateShare.leave

    def noting(late: Any, unmade: UnmadePieces | None) -> None:
        left.extend([unmade] if unmade is not None else [])
        leave(late, unmade)

    monkeypatch.setattr(binder.LateShare, "leave", noting)
    found = trained(optimizer, 2, torch.float32, **options)
    assert bool(left) == is_left
    monkeypatch.setattr(binder, "what_is_left", lambda wait: None)
    for one, other in zip(found, trained(optimizer, 2, torch.float32, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "num_devices", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_norm_and_the_steps_are_those_of_one_device(num_devices: int) -> None:
    """With 64 bits, of which only what is finite is told by factors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(380, 400), nn.Tanh(), nn.Linear(400, 3)).double()
    plain = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, fused=True) for one in (net, plain)]
    with mirrorc.compile(
        net,
        num_devices,
        optimizer=optimizers[0],
        loss_fn=F.mse_loss,
        backend="eager",
        clip_grad_norm=0.01,
        check_finite=True,
    ) as step:
        for size in (7, 5, 9):
            x, target = torch.randn(size, 380).double(), torch.randn(size, 3).double()
            step(x, target=target)
            optimizers[1].zero_grad()
            F.mse_loss(plain(x), target).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            optimizers[1].step()
            torch.testing.assert_close(step.grad_norm, norm, rtol=1e-12, atol=0.0)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class WithRoot(nn.Module):
    """Has a parameter whose gradient is infinite at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(400, 400)
        self.root = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.root.sqrt()


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}])
def test_what_is_not_made_yet_is_not_called_infinite(options: dict[str, Any]) -> None:
    """The memory of a product holds what an earlier step has left there."""
    net = WithRoot()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, target = torch.randn(4, 400), torch.zeros(4, 400)
    with mirrorc.compile(
        net, 2, optimizer=optimizer, loss_fn=F.mse_loss, backend="eager", check_finite=True, **options
    ) as step:
        with pytest.raises(mirrorc.NonFiniteError, match=r"'root' is not finite .* so is that of 2 other"):
            step(x * math.nan, target=target)
        with pytest.raises(mirrorc.NonFiniteError, match=r"gradient of 'root' is not finite \(1 of 1 element") as told:
            step(x, target=target)
    assert "other variable" not in str(told.value)


@pytest.mark.parametrize("largest", [1e20, 1e15])
def test_products_of_finite_factors_may_overflow(largest: float) -> None:
    """They are looked at when they may, and a step whose products do not overflow in the end is made."""
    net = nn.Linear(400, 400, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    x, target = torch.full((4, 400), largest), torch.zeros(4, 400)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.detach() * 0 + (output - output.detach()) * 1e22 + target).mean()

    with mirrorc.compile(net, 2, optimizer=optimizer, loss_fn=loss_fn, backend="eager", check_finite="skip") as step:
        step(x, target=target)
        assert step.num_skipped == (1 if largest == 1e20 else 0)


def test_what_a_skipped_step_has_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by the functions that a thread for each device runs and by those of one thread, after both were bound."""
    made: list[Noted] = []
    forgotten: list[Noted] = []

    class Noted(binder.LateShare):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def forget(self) -> None:
            forgotten.append(self)
            super().forget()

    monkeypatch.setattr(binder, "LateShare", Noted)
    net = nn.Linear(400, 400)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with mirrorc.compile(net, 2, optimizer=optimizer, loss_fn=F.mse_loss, backend="eager", check_finite="skip") as step:
        x, target = torch.randn(4, 400), torch.full((4, 400), math.inf)
        step(x, target=target)
        for interleaves in (True, False):
            forgotten.clear()
            trial = step._last.trial  # type: ignore[union-attr]
            trial.interleaves, trial.is_decided = interleaves, True
            step(x, target=target)
        assert step.num_skipped == 3
    assert len(made) == len(forgotten) == 4 and all(late in forgotten for late in made)
