"""A loss of torch that reduces otherwise than the step is told is warned of; what may be a mean made of a sum is not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F

X = torch.randn(6, 3)
Loss = Callable[[torch.Tensor, torch.Tensor], Any]


def said(loss_fn: Loss, devices: int = 2, return_outputs: bool = False, **options: Any) -> list[str]:
    options = {"loss_fn": loss_fn, "return_outputs": return_outputs, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sgd_step(nn.Linear(3, 3), devices, **options) as step:
            step(X, target=torch.ones(6, 3))
            step(X[:4], target=torch.ones(4, 3))
    found = [w for w in caught if w.category is UserWarning]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


SUMS: dict[str, Loss] = {
    "function": lambda o, y: F.mse_loss(o, y, reduction="sum"),
    "by position": lambda o, y: F.smooth_l1_loss(o, y, None, None, "sum"),
    "a summand": lambda o, y: 0.1 * o.square().mean() + F.binary_cross_entropy_with_logits(o, y, reduction="sum"),
    "subtracted": lambda o, y: o.mean().sub(F.l1_loss(o, y, reduction="sum")),
    "divided by a number": lambda o, y: F.mse_loss(o, y, reduction="sum") / 4,
    "scaled": lambda o, y: 0.125 * F.mse_loss(o, y, reduction="sum"),
    "divided by the whole batch": lambda o, y: F.mse_loss(o, y, reduction="sum").div(6),
    "metrics": lambda o, y: (F.mse_loss(o, y, reduction="sum"), {"mean": o.mean()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(SUMS))
def test_a_sum_is_warned_of_where_the_loss_is_taken_for_a_mean(kind: str) -> None:
    (message,) = said(SUMS[kind], return_outputs=kind == "metrics")
    assert "in the loss of Linear is a sum, but the step averages it over devices" in message
    assert "about 1/2 of the sum over the batch\n  fix:  mirrorc.compile(..., loss_reduction='sum')" in message
    assert not said(SUMS[kind], devices=1)


@pytest.mark.slow
def test_a_mean_is_warned_of_where_the_loss_is_taken_for_a_sum() -> None:
    (message,) = said(lambda o, y: F.mse_loss(o, y), devices=3, loss_reduction="sum")
    assert "mse_loss in the loss of Linear is a mean, but loss_reduction='sum' adds it up" in message
    assert "about 3 times the mean of the batch" in message
    (message,) = said(lambda o, y: F.kl_div(o, y, reduction="batchmean"), loss_reduction="sum")
    assert "kl_div" in message


RIGHT: dict[str, Loss] = {
    "divided": lambda o, y: F.mse_loss(o, y, reduction="sum") / len(o),
    "multiplied": lambda o, y: F.mse_loss(o, y, reduction="sum") * (1 / len(o)),
    "mean": lambda o, y: F.mse_loss(o, y),
    "half": lambda o, y: 0.5 * F.mse_loss(o, y, reduction="sum") / len(o),
    "elements": lambda o, y: F.mse_loss(o, y, reduction="sum") / o.numel(),
    "each example": lambda o, y: F.mse_loss(o, y, reduction="none").sum(1).mean(),
    "batchmean": lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RIGHT))
def test_what_is_a_mean_or_may_be_one_is_not_spoken_of(kind: str) -> None:
    assert not said(RIGHT[kind])


def test_a_mean_times_the_number_of_examples_is_a_sum() -> None:
    assert not said(lambda o, y: len(o) * F.mse_loss(o, y), loss_reduction="sum")


def test_a_number_from_outside_may_be_that_of_a_shard() -> None:
    assert not said(lambda o, y: F.mse_loss(o, y, reduction="sum") / 9, loss_reduction="sum")


def test_a_sum_that_is_told_is_not_spoken_of() -> None:
    assert not said(lambda o, y: F.mse_loss(o, y, reduction="sum"), loss_reduction="sum")


def test_a_penalty_on_parameters_alone_is_not_spoken_of() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            apart = F.mse_loss(self.linear.weight, self.other.weight, reduction="sum")
            return self.other(self.linear(x)).square().mean() + apart

    model = Model()
    with warnings.catch_warnings(), sgd_step(model, 2) as step:
        warnings.simplefilter("error")
        step(X)
