"""Computes sums and gathers along rows from one element of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

aten = torch.ops.aten

V = TypeVar("V")


@dataclass(frozen=True)
class ValueOp(Generic[V]):
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype


class RowValues(Protocol[V]):
    """Access to values of type V: nodes in a pass, value numbers in the verifier."""

    def op_of(self, value: Any) -> ValueOp[V] | None:
        """None if the value is not a tensor, or its operator is unknown."""

    def apply(self, target: Any, args: tuple[Any, ...]) -> V: ...


@dataclass(frozen=True)
class _OneHot(Generic[V]):
    """One-hot rows: the position of the element in each row (size 1 along the rows), and its value."""

    index: V
    element: Any


_MOST_FOLLOWED = 16  # operators between a value and the origin of its rows; a loss has a few

ROW_READERS = frozenset({aten.sum.dim_IntList, aten.gather.default})
READ_THROUGH = frozenset({aten.sub.Tensor, torch.ops.prims.convert_element_type.default})
"""Elementwise operators through which an element can be traced to its operands."""

ROW_MAKERS = READ_THROUGH | {aten.full.default, aten.scatter.value, aten.mul.Tensor}
"""All operators that the recognition of rows needs."""


def by_elements(values: RowValues[V], op: ValueOp[V]) -> V | None:
    """``op`` is one of `ROW_READERS`. None if it needs all elements."""
    return sum_of_one_hot(values, op) if op.target is aten.sum.dim_IntList else element_of_row(values, op)


def sum_of_one_hot(values: RowValues[V], op: ValueOp[V]) -> V | None:
    """Computes a sum of one-hot rows from one element per row; None for other operators.

    Adds zero, because a sum is never negative zero.
    """
    if op.target is not aten.sum.dim_IntList or op.kwargs or len(op.args) != 3 or op.args[2] is not True:
        return None
    source = values.op_of(op.args[0])
    if source is None or len(op.args[1]) != 1 or not source.dtype.is_floating_point:
        return None
    dim = op.args[1][0] % len(source.shape) if source.shape else 0
    row = _one_hot(values, op.args[0], dim, {})
    if row is None or isinstance(row.element, int | float):
        return None
    return values.apply(aten.add.Tensor, (row.element, 0.0))


def element_of_row(values: RowValues[V], op: ValueOp[V]) -> V | None:
    """Gathers from the operands of a gather's source, bit for bit. None for other operators, or without a gain."""
    if op.target is not aten.gather.default or op.kwargs or len(op.args) != 3:
        return None
    source, dim, index = op.args
    return _element(values, source, dim % max(1, len(op.shape)), index)


def _element(values: RowValues[V], source: V, dim: int, index: V, most: int = _MOST_FOLLOWED) -> V | None:
    op, at = values.op_of(source), values.op_of(index)
    if op is None or at is None or op.kwargs or op.target not in READ_THROUGH or not op.shape or not most:
        return None
    if not _is_row_of(at.shape, op.shape, dim, size=None):
        return None
    whole, rest = op.args[0], op.args[1:]
    operand = values.op_of(whole)
    if operand is None or operand.shape != op.shape:
        return None
    if op.target is aten.sub.Tensor and not _is_constant_in_rows(values, rest, op, dim, operand):
        return None
    element = _element(values, whole, dim, index, most - 1)
    element = values.apply(aten.gather.default, (whole, dim, index)) if element is None else element
    return values.apply(op.target, (element, *rest))


def _is_constant_in_rows(
    values: RowValues[V], rest: tuple[Any, ...], op: ValueOp[V], dim: int, operand: ValueOp[V]
) -> bool:
    other = values.op_of(rest[0]) if len(rest) == 1 else None
    return (
        other is not None
        and other.dtype is op.dtype is operand.dtype
        and _is_row_of(other.shape, op.shape, dim, size=1)
    )


def _one_hot(values: RowValues[V], value: Any, dim: int, known: dict[int, _OneHot[V] | None]) -> _OneHot[V] | None:
    if id(value) not in known:
        if len(known) == _MOST_FOLLOWED:
            return None
        known[id(value)] = None  # a value is not computed from itself
        known[id(value)] = _made_one_hot(values, value, dim, known)
    return known[id(value)]


def _made_one_hot(values: RowValues[V], value: Any, dim: int, known: dict[int, _OneHot[V] | None]) -> _OneHot[V] | None:
    op = values.op_of(value)
    if op is None or op.kwargs:
        return None
    if op.target is aten.scatter.value:
        return _scattered(values, op, dim)
    if op.target is torch.ops.prims.convert_element_type.default:
        row = _one_hot(values, op.args[0], dim, known)
        if row is None or isinstance(row.element, int | float):
            return None
        return _OneHot(row.index, values.apply(op.target, (row.element, *op.args[1:])))
    if op.target is aten.mul.Tensor:
        left, right = op.args
        return _scaled(values, op, left, right, dim, known) or _scaled(values, op, right, left, dim, known)
    return None


def _scattered(values: RowValues[V], op: ValueOp[V], dim: int) -> _OneHot[V] | None:
    base, along, index, element = op.args
    zeros, at = values.op_of(base), values.op_of(index)
    is_zero = zeros is not None and zeros.target is aten.full.default and zeros.args[1] == 0
    if not is_zero or at is None or along % max(1, len(op.shape)) != dim or not isinstance(element, int | float):
        return None
    return _OneHot(index, element) if _is_row_of(at.shape, op.shape, dim, size=1) else None


def _scaled(
    values: RowValues[V], op: ValueOp[V], rows: Any, factor: Any, dim: int, known: dict[int, _OneHot[V] | None]
) -> _OneHot[V] | None:
    row, source, by = _one_hot(values, rows, dim, known), values.op_of(rows), values.op_of(factor)
    if row is None or source is None or source.shape != op.shape or by is None or by.dtype is not op.dtype:
        return None
    if by.shape == op.shape and op.shape[dim] != 1:
        element = _element(values, factor, dim, row.index)
        factor = values.apply(aten.gather.default, (factor, dim, row.index)) if element is None else element
    elif not _is_row_of(by.shape, op.shape, dim, size=1):
        return None
    return _OneHot(row.index, values.apply(aten.mul.Tensor, (factor, row.element)))


def _is_row_of(shape: tuple[int, ...], whole: tuple[int, ...], dim: int, size: int | None) -> bool:
    if len(shape) != len(whole) or (size is not None and shape[dim] != size):
        return False
    return all(size_there == other for i, (size_there, other) in enumerate(zip(shape, whole, strict=True)) if i != dim)
