"""Matrix products with padded columns. Padding changes no other column of the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

FACTORS: dict[Any, tuple[int, int]] = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""By operator, the indices of the two multiplied matrices among its arguments."""


def places_of_columns(node: fx.Node) -> tuple[int, ...]:
    """Indices of the arguments that have a product's columns: the addend, if it has them, then the second matrix."""
    first, second = FACTORS[node.target]
    columns = node.args[second].meta["val"].shape[1]  # type: ignore[union-attr]
    others = [i for i in range(len(node.args)) if i not in (first, second)]
    return (*(i for i in others if node.args[i].meta["val"].shape[-1:] == (columns,)), second)  # type: ignore[union-attr]


def first_columns(node: fx.Node) -> Any:
    if node.target is not aten.slice.Tensor or node.kwargs or len(node.args) != 4:
        return None
    _, dim, first, last = node.args
    return last if (dim, first) == (1, 0) and node.meta["val"].dim() == 2 else None


def columns_before_padding(node: fx.Node) -> Any:
    """None for a node that does not pad the ends of rows."""
    if node.target is not aten.constant_pad_nd.default or node.kwargs or len(node.args) != 2:
        return None
    value, padding = node.args
    is_at_the_end = isinstance(padding, list | tuple) and len(padding) == 2 and padding[0] == 0
    return value.meta["val"].shape[-1] if is_at_the_end else None  # type: ignore[union-attr]
