"""Operators that change a value's layout, or depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.torch_internals import is_operator

aten = torch.ops.aten

LAYOUT_ONLY: Mapping[Any, str] = {
    aten.clone.default: "copies its elements into memory of the format that it names",
    aten.contiguous.default: "is its argument, or a copy of it in the format that it names",
    aten._to_copy.default: "copies its elements; with a dtype or a device it does more, and is not looked through",
}
"""Operators that change only the memory format, and descriptions. Without ``memory_format`` they are necessary copies.
"""

BY_POSITION = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
    aten._reshape_alias.default, aten._reshape_alias_copy.default,
)  # fmt: skip
_READ_STRIDES = (*BY_POSITION, aten.view.dtype)
_OF_TORCH = ("aten", "prims")


def strides_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    return [strides_of(part) for part in value] if isinstance(value, list | tuple) else None


def is_layout_only(node: fx.Node) -> bool:
    return node.target in LAYOUT_ONLY and len(node.args) == 1 and node.kwargs.keys() == {"memory_format"}


def reads_strides(target: Any) -> bool:
    return target in _READ_STRIDES


def may_read_memory_in_order(target: Any) -> bool:
    """Operators from outside torch may draw random numbers in memory order."""
    return is_operator(target) and target.namespace not in _OF_TORCH
