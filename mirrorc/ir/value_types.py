"""Types of values: shape, strides, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.torch_internals import is_symbolic, size_key, sizes_key


@dataclass(frozen=True)
class Pending:
    """A collective's result in flight; only `wait` turns it into a value."""

    value: Any


ValueType = Any
"""Hashable: ``("tensor", shape, strides, dtype, device)``, ``("pending", type)``, ``("tuple", types)`` or a constant."""


def value_type(value: Any) -> ValueType:
    if isinstance(value, torch.Tensor):
        return ("tensor", sizes_key(value.shape), sizes_key(value.stride()), value.dtype, value.device)
    if isinstance(value, Pending):
        return ("pending", value_type(value.value))
    if isinstance(value, list | tuple):
        return ("tuple", tuple(value_type(item) for item in value))
    return size_key(value) if is_symbolic(value) else value


def has_symbols_in(kind: ValueType) -> bool:
    if isinstance(kind, tuple):
        return any(map(has_symbols_in, kind))
    return hasattr(kind, "free_symbols")


def is_same_type(kind: ValueType, other: ValueType) -> bool:
    """Ignores strides of dimensions of size 1, and device indices."""
    return bool(kind == other) or bool(_canonical(kind) == _canonical(other))


def _canonical(kind: ValueType) -> ValueType:
    if not isinstance(kind, tuple):
        return kind
    if kind[0] == "pending":
        return ("pending", _canonical(kind[1]))
    if kind[0] == "tuple":
        return ("tuple", tuple(_canonical(item) for item in kind[1]))
    _, shape, strides, dtype, device = kind
    return ("tensor", shape, tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)), dtype, device.type)


def say_type(kind: ValueType) -> str:
    """Prints a type, with strides if the tensor is not contiguous."""
    if not isinstance(kind, tuple):
        return str(kind)
    if kind[0] == "pending":
        return f"pending {say_type(kind[1])}"
    if kind[0] == "tuple":
        return f"({', '.join(say_type(item) for item in kind[1])})"
    dense = ("tensor", kind[1], contiguous_strides(kind[1]), *kind[3:])
    text = f"{str(kind[3]).removeprefix('torch.')}{list(kind[1])}"
    text += "" if _canonical(kind)[2] == _canonical(dense)[2] else f" with strides {list(kind[2])}"
    return text + (f" on {kind[4].type}" if kind[4].type != "cpu" else "")


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))
