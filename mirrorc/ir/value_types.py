"""Types of values: what is known of a value without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pending:
    """The type of a collective's result while it is in flight; only `wait` turns it into a value.

    Attributes:
        value: the (fake) tensor that `wait` will give.
    """

    value: Any


ValueType = Any
"""Hashable: ``("tensor", shape, strides, dtype, device)``, ``("pending", type)``, ``("tuple", types)`` or a constant."""


def value_type(value: Any) -> ValueType:
    """The type of a (fake) value."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, Pending):
        return ("pending", value_type(value.value))
    if isinstance(value, list | tuple):
        return ("tuple", tuple(value_type(item) for item in value))
    return value


def is_same_type(one: ValueType, other: ValueType) -> bool:
    """Whether two types are equal; strides of dimensions of size 1, and the numbers of devices, are not compared."""
    return bool(one == other) or bool(_canonical(one) == _canonical(other))


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
    """Prints a type for an error message; strides are shown if the tensor is not contiguous."""
    if not isinstance(kind, tuple):
        return str(kind)
    if kind[0] == "pending":
        return f"pending {say_type(kind[1])}"
    if kind[0] == "tuple":
        return f"({', '.join(say_type(item) for item in kind[1])})"
    dense = value_type(torch.empty(kind[1], dtype=kind[3], device="meta"))
    text = f"{str(kind[3]).removeprefix('torch.')}{list(kind[1])}"
    text += "" if _canonical(kind)[2] == _canonical(dense)[2] else f" with strides {list(kind[2])}"
    return text + (f" on {kind[4].type}" if kind[4].type != "cpu" else "")
