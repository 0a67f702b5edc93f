"""Decompositions of ours, for operators of which Inductor's own make slow code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """A table of Inductor's with ours in place of some.

    GELU's approximation ``0.5 x (1 + tanh(u))`` is ``x sigmoid(2 u)``, which needs no tanh: on CPUs Inductor's takes six times as
    long as its exp.
    """
    return {
        **table,
        aten.gelu.default: _gelu(table[aten.gelu.default]),
        aten.gelu_backward.default: _gelu_backward(table[aten.gelu_backward.default]),
    }


def _gelu(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        if approximate != "tanh":
            return of_torch(x, approximate=approximate)
        exact = _exact(x)
        return (exact * torch.sigmoid(2 * _SCALE * _argument(exact))).to(x.dtype)

    return gelu


def _gelu_backward(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def gelu_backward(gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        if approximate != "tanh":
            return of_torch(gradient, x, approximate=approximate)
        exact = _exact(x)
        share = torch.sigmoid(2 * _SCALE * _argument(exact))
        slope = 2 * _SCALE * (1 + 3 * _CUBIC * (exact * exact))
        return (_exact(gradient) * (share + exact * (share * (1 - share)) * slope)).to(x.dtype)

    return gelu_backward


def _argument(x: torch.Tensor) -> torch.Tensor:
    return x + _CUBIC * (x * x * x)


def _exact(x: torch.Tensor) -> torch.Tensor:
    """What torch computes with: float32 for 16-bit numbers."""
    return x.to(torch.float32) if x.dtype.itemsize < 4 else x
