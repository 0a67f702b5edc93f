"""Which operators only lay values out in memory, and which look at how they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.ir.nodes import is_operator

aten = torch.ops.aten

LAYOUT_ONLY: Mapping[Any, str] = {
    aten.clone.default: "copies its elements into memory of the format that it names",
    aten.contiguous.default: "is its argument, or a copy of it in the format that it names",
    aten._to_copy.default: "copies its elements; with a dtype or a device it does more, and is not looked through",
}
"""Operators whose result equals their first argument element by element, if ``memory_format`` is all that they are told; and why.

Without a format, they are a copy that somebody wants for its own sake: a gradient that nothing else uses, for one.
"""

SAME_ORDER: Mapping[Any, str] = {
    aten.view.default: "is the same memory",
    aten._unsafe_view.default: "is the same memory, of which nothing else is a view",
    aten.reshape.default: "is the same memory, or a copy where elements do not lie as the shape needs them",
}
"""Operators that give the elements of their first argument in the order of its indices, in another shape; and how."""

_READ_STRIDES = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    aten.view.dtype,
)
_OF_TORCH = ("aten", "prims")


def is_layout_only(node: fx.Node) -> bool:
    """Whether a node's value is its first argument, element by element, and only lies otherwise in memory."""
    return node.target in LAYOUT_ONLY and len(node.args) == 1 and node.kwargs.keys() == {"memory_format"}


def reads_strides(target: Any) -> bool:
    """Whether an operator takes elements by where they lie, so that a value that lies otherwise means something else to it."""
    return target in _READ_STRIDES


def may_read_memory_in_order(target: Any) -> bool:
    """Whether this is an operator that torch does not define.

    It may draw random numbers in the order of memory, or have been written for one format.
    """
    return is_operator(target) and target.namespace not in _OF_TORCH
