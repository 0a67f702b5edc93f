"""Losses of torch.distributions are captured, and what they check of parameters and values stops the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from references import assert_same_model, unchanged
from torch import distributions as D
from torch import nn
from twins import Twins, compiled_step

import mirrorc
from mirrorc import ExecutionError


def policy(out: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    actions, advantages = target
    chosen = D.Categorical(logits=out)
    return -(chosen.log_prob(actions) * advantages).mean() - 0.01 * chosen.entropy().mean()


def likelihood(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mean, scale = out.chunk(2, dim=1)
    posterior = D.Independent(D.Normal(mean, nn.functional.softplus(scale)), 1)
    prior = D.Independent(D.Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
    return D.kl_divergence(posterior, prior).mean() - posterior.log_prob(target).mean()


def positive(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    shape, rate = out.exp().chunk(2, dim=1)
    return -D.Gamma(shape, rate).log_prob(target.square() + 0.1).mean() - D.Beta(shape, rate).entropy().mean()


def normal(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mean, scale = out.chunk(2, dim=1)
    return -D.Normal(mean, scale).log_prob(target).mean()


def exponential(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -D.Exponential(out[:, :2].exp()).log_prob(target).mean()


def compiled(model: nn.Module, loss_fn: Callable[..., Any]) -> mirrorc.Step:
    return compiled_step(model, loss_fn, optimizer=torch.optim.AdamW, capture="dynamo")


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [policy, likelihood, positive], ids=lambda loss_fn: loss_fn.__name__)
def test_losses_of_distributions_are_captured(loss_fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # torch.compile sets it to False for good
    torch.manual_seed(0)
    options: dict[str, Any] = {"capture": "dynamo", "tolerance": 1e-12}
    pair = Twins(nn.Linear(5, 4).double(), torch.optim.AdamW, loss_fn, **options)
    with pair, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            values = torch.randn(7, 2, dtype=torch.float64)
            target: Any = (torch.randint(0, 4, (7,)), values[:, 0]) if loss_fn is policy else values
            pair.train(torch.randn(7, 5, dtype=torch.float64), target=target)
        assert_same_model(pair.model, pair.twin, 1e-12)
    assert D.Distribution._validate_args


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [(normal, "the parameter scale of a distribution Normal"), (exponential, "a value of a distribution Exponential")],
    ids=["parameter", "value"],
)
def test_what_a_distribution_refuses_stops_the_step(
    loss_fn: Callable[..., Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)
    model = nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    x, target = torch.rand(6, 4, dtype=torch.float64) + 0.5, torch.rand(6, 2, dtype=torch.float64)
    with compiled(model, loss_fn) as step:
        step(x, target=target)
        bad_x, bad_target = x.clone(), target.clone()
        bad_x[4, 3] = bad_target[4, 1] = -9.0
        with unchanged(model), pytest.raises(ExecutionError) as failed:
            step(bad_x, target=bad_target)
        assert told in str(failed.value) and "test_distributions.py:" in str(failed.value)
        D.Distribution.set_default_validate_args(False)
        step(x, target=bad_target)  # compiled anew, without checks


def test_a_distribution_that_checks_nothing_is_not_checked() -> None:
    def unchecked(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -D.Normal(out[:, :2], out[:, 2:], validate_args=False).log_prob(target).mean()

    with compiled(nn.Linear(4, 4).double(), unchecked) as step:
        step(torch.randn(6, 4, dtype=torch.float64), target=torch.randn(6, 2, dtype=torch.float64))
        assert "check(" not in str(step.program)


@pytest.mark.parametrize(
    ("shape", "told"),
    [((6, 3), "does not fit a distribution Normal with a batch of shape"), ((), "takes a tensor, not 0.5")],
)
def test_a_value_of_another_kind_is_refused(shape: tuple[int, ...], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -D.Normal(out[:, :2], out[:, 2:].exp()).log_prob(target if shape else 0.5).mean()

    model = nn.Linear(4, 4).double()
    with compiled(model, loss) as step, unchanged(model), pytest.raises(mirrorc.CaptureError) as refused:
        step(torch.randn(6, 4).double(), target=torch.randn(shape or (6, 2)).double())
    assert told in str(refused.value)
