"""Autograd functions whose gradients Dynamo would take wrongly are refused while a trace runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mirrorc import torch_internals as internals


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class DoublingAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Doubled(nn.Module):
    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return Doubling.apply(leaves[0])[0].sum()


class DoubledAlone(nn.Module):
    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return DoublingAlone.apply(leaves[0]).sum()


def test_functions_that_take_gradients_as_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    with internals.checked_autograd_functions(), pytest.raises(Exception, match=r"ctx\.set_materialize_grads\(\)"):
        internals.trace_full_graph(Doubled(), (x,))
    with internals.checked_autograd_functions():
        with torch.no_grad():
            assert internals.trace_full_graph(Doubled(), (x,))(x) == 4
        assert internals.trace_full_graph(DoubledAlone(), (x,))(x) == 4  # a gradient that is there
    assert internals.trace_full_graph(Doubled(), (x,))(x) == 4  # if this fails, torch refuses them by itself
