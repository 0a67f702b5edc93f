"""Replaces ``x[mask] = value`` by a ``where``, whose gradient has a fixed shape."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx


def choose_where_masked(graph: fx.Graph) -> None:
    """Rewrites ``x[mask] = value`` to ``x.copy_(torch.where(mask, value, x))`` if the value requires a gradient.

    Backward of the assignment would gather the gradient at the masked places, and their number depends on the mask.
    """
    for node in list(graph.find_nodes(op="call_function", target=operator.setitem)):
        place, mask, value = node.args
        if not _is_masked(place, mask, value):
            continue
        source, chosen = (arg.meta["example_value"] for arg in (place, mask))
        with graph.inserting_before(node):
            wide = graph.call_method("reshape", (mask, (*chosen.shape, *(1,) * (source.dim() - chosen.dim()))))
            new = graph.call_function(torch.where, (wide, value, place))
            copied = graph.call_method("copy_", (place, new))
        for made in (wide, new, copied):
            made.meta = {**node.meta, "example_value": source}
        wide.meta["example_value"] = chosen.reshape((*chosen.shape, *(1,) * (source.dim() - chosen.dim())))
        graph.erase_node(node)
    graph.owning_module.recompile()  # type: ignore[union-attr]


def _is_masked(place: Any, mask: Any, value: Any) -> bool:
    if not all(isinstance(arg, fx.Node) for arg in (place, mask, value)):
        return False
    values = [arg.meta.get("example_value") for arg in (place, mask, value)]
    if not all(isinstance(item, torch.Tensor) for item in values):
        return False
    source, chosen, assigned = values
    if not all(type(size) is int for item in values for size in item.shape):  # such as a size that depends on the mask
        return False
    is_mask = chosen.dtype == torch.bool and chosen.shape == source.shape[: chosen.dim()] and chosen.dim() > 0
    counted = len([*itertools.dropwhile(lambda size: size == 1, assigned.shape)])  # PyTorch leaves out leading ones
    is_alike = (
        counted <= source.dim() - chosen.dim() and assigned.dim() <= source.dim() and assigned.dtype == source.dtype
    )
    return is_mask and is_alike and assigned.requires_grad
