"""Sums, means and concatenations of replicas' values outside of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.messages.problem import problem


def reduced(values: Sequence[Any], op: str, dim: int | None) -> Any:
    if op not in ("sum", "mean"):
        raise problem(ValueError, f"MC1307: op is {op!r}", "values are summed up or averaged", "say 'sum' or 'mean'")
    return _combined(values, lambda tensors: _reduced(tensors, op, dim))


def gathered(values: Sequence[Any], dim: int) -> Any:
    return _combined(values, lambda tensors: _gathered(tensors, dim))


def _combined(values: Sequence[Any], combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Applies ``combine`` to the tensors at each place of nested containers."""
    first = values[0] if values else None
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        return combine([value.to(first.device) for value in values])
    if any(type(value) is not type(first) for value in values) or not isinstance(first, Mapping | list | tuple):
        kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in values)) or "nothing"
        raise problem(
            TypeError,
            f"MC1307: the values are {kinds}",
            "tensors are reduced and gathered, alone or in dicts, lists and tuples",
            "value.values, for the values themselves",
        )
    places = [tuple(value) if isinstance(value, Mapping) else range(len(value)) for value in values]
    if any({*place} != {*places[0]} for place in places):
        raise problem(
            ValueError, "MC1307: the values have other entries", fix="value.values, for the values themselves"
        )
    combined = [_combined([value[place] for value in values], combine) for place in places[0]]
    if isinstance(first, Mapping):
        return dict(zip(places[0], combined, strict=True))
    return type(first)(*combined) if hasattr(first, "_fields") else type(first)(combined)


def _reduced(tensors: list[torch.Tensor], op: str, dim: int | None) -> torch.Tensor:
    if op == "mean" and any(tensor.dtype is torch.bool for tensor in tensors):
        raise problem(TypeError, "MC1307: booleans have no mean", fix="value.reduce('sum'), which counts them")
    num_terms = len(tensors) if dim is None else sum(tensor.size(dim) for tensor in tensors)
    given = tensors[0].dtype
    wide = torch.promote_types(given, torch.float32 if given.is_floating_point or given.is_complex else torch.int64)
    terms = [tensor.to(wide) if dim is None else tensor.sum(dim, dtype=wide) for tensor in tensors]
    if any(term.shape != terms[0].shape for term in terms):
        raise _other_shapes(tensors, "give the dim in which they differ: value.reduce('sum', dim=0)")
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    total = total / num_terms if op == "mean" else total
    total = total.to(given) if wide.is_floating_point or wide.is_complex else total
    return total.clone() if total is tensors[0] else total


def _gathered(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    other_sizes = {
        (t.dim(), *(size for i, size in enumerate(t.shape) if i != dim % t.dim())) for t in tensors if t.dim()
    }
    if len(other_sizes) > 1 or not all(t.dim() for t in tensors):
        raise _other_shapes(tensors, "pad them, or take value.values")
    return torch.cat(tensors, dim)


def _other_shapes(tensors: Sequence[torch.Tensor], fix: str) -> ValueError:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return problem(ValueError, "MC1307: the values have other shapes", shapes, fix)
