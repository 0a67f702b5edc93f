"""Weights that `torch.nn.utils.parametrize.cached` keeps are refused: replicas have weights of their own and one cache."""

from __future__ import annotations

import contextlib

import pytest
import torch
from references import unchanged
from selections import slow
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from twins import compiled_step

from mirrorc.errors import CaptureError, ExecutionError


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class Net(nn.Module):
    def __init__(self, *, caches: bool) -> None:
        super().__init__()
        self.layer = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())
        self.caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached() if self.caches else contextlib.nullcontext():
            return self.layer(self.layer(x).tanh())


def batch() -> torch.Tensor:
    return torch.ones(4, 3, dtype=torch.float64)


@pytest.mark.parametrize("capture", ["autograd", *slow(("dynamo",), ("auto",))])
@pytest.mark.parametrize("is_inside", [False, True], ids=["around the step", "in forward"])
def test_a_cache_is_refused(capture: str, is_inside: bool) -> None:
    model = Net(caches=is_inside).double()
    with compiled_step(model, F.mse_loss, capture=capture) as step:
        around = contextlib.nullcontext() if is_inside else parametrize.cached()
        with unchanged(model), around, pytest.raises(CaptureError, match=r"MC2301.*parametrize\.cached\(\)"):
            step(batch(), target=batch())
        model.caches = False
        step(batch(), target=batch())


@pytest.mark.slow
def test_a_cache_around_a_later_step_is_refused_as_well() -> None:
    model = Net(caches=False).double()
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        step(batch(), target=batch())
        with unchanged(model), parametrize.cached(), pytest.raises(ExecutionError, match=r"parametrize\.cached\(\)"):
            step(batch(), target=batch())
        step(batch(), target=batch())
