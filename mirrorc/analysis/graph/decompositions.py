"""Decompositions of GELU without tanh, equal except for rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from mirrorc.torch_internals import FakeTensorMode, traced_on_fake_tensors

aten = torch.ops.aten

_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def is_tanh_gelu(node: fx.Node) -> bool:
    return node.target in DECOMPOSITIONS and node.kwargs.get("approximate") == "tanh"


def tensors_of(node: fx.Node) -> list[fx.Node]:
    return [argument for argument in node.args if isinstance(argument, fx.Node)]


def decomposition_of(node: fx.Node) -> fx.Graph | None:
    """A graph with a placeholder for each tensor of the node; None unless `is_tanh_gelu`."""
    if not is_tanh_gelu(node):
        return None
    return _decomposition(node.target, tuple([tensor.meta["val"].dtype for tensor in tensors_of(node)]))


@functools.cache
def _decomposition(target: Any, dtypes: tuple[torch.dtype, ...]) -> fx.Graph:
    with FakeTensorMode():
        values = [torch.empty(2, dtype=dtype) for dtype in dtypes]
    return traced_on_fake_tensors(DECOMPOSITIONS[target], values)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """``aten.gelu(x, approximate="tanh")`` without tanh. Computes 16-bit numbers in float32, as torch does."""
    exact = _exact(x)
    return _cast(exact * torch.sigmoid(2 * _SCALE * _argument(exact)), x.dtype)


def gelu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``aten.gelu_backward(gradient, x, approximate="tanh")`` without tanh; see `gelu`."""
    exact = _exact(x)
    share = torch.sigmoid(2 * _SCALE * _argument(exact))
    slope = 2 * _SCALE * (1 + 3 * _CUBIC * (exact * exact))
    rest = -share + 1  # not 1 - share, an operator that Inductor wants decomposed
    return _cast(_exact(gradient) * (share + exact * (share * rest) * slope), x.dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., torch.Tensor]] = MappingProxyType(
    {aten.gelu.default: gelu, aten.gelu_backward.default: gelu_backward}
)
"""By operator, equivalent functions of its tensors without tanh, for nodes with `is_tanh_gelu`."""


def _argument(x: torch.Tensor) -> torch.Tensor:
    return x + _CUBIC * (x * x * x)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return _cast(x, torch.float32) if x.dtype.itemsize < 4 else x


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # both backends run it unchanged
    return torch.ops.prims.convert_element_type(x, dtype) if x.dtype is not dtype else x
