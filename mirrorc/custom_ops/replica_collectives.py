"""Operators on values of all replicas. Plain PyTorch counts as one replica."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")
RowsOfAll = Callable[[torch.Tensor], int]
"""The total number of rows of all replicas for a gathered value."""

_rows: contextvars.ContextVar[RowsOfAll] = contextvars.ContextVar("rows", default=len)
_error: contextvars.ContextVar[Exception | None] = contextvars.ContextVar("error", default=None)


@contextlib.contextmanager
def gathering(rows_of_all: RowsOfAll) -> Iterator[None]:
    """Marks a trace as that of one replica among several."""
    token = _rows.set(rows_of_all)
    try:
        yield
    finally:
        _rows.reset(token)


@contextlib.contextmanager
def refused_collectives(error: Exception) -> Iterator[None]:
    """Makes plain PyTorch raise ``error`` if it asks for values of other replicas."""
    token = _error.set(error)
    try:
        yield
    finally:
        _error.reset(token)


def _alone(value: torch.Tensor) -> torch.Tensor:
    if (error := _error.get()) is not None:
        raise error
    return value.clone(memory_format=torch.contiguous_format)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _rows_alone(value: torch.Tensor, rows: int) -> torch.Tensor:
    if len(value) != rows:
        raise RuntimeError(f"own_rows_of_sum is asked for {rows} rows of {len(value)}, and there is one replica")
    return _alone(value)


def _gathered(value: torch.Tensor) -> torch.Tensor:
    return value.new_empty((_rows.get()(value), *value.shape[1:]))


def _fake_rows(value: torch.Tensor, rows: int) -> torch.Tensor:
    return value.new_empty((rows, *value.shape[1:]))


def _gradient_of_sum(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return all_reduce_value(gradient)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.rows = len(inputs[0])


def _gradient_of_gathered(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return own_rows_of_sum(gradient, ctx.rows)


def _gradient_of_rows(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_gather_value(gradient), None


def _register(schema: str, alone: Any, fake: Any, gradient: Any = None, keep: Any = None) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, alone, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mirrorc::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"mirrorc::{name}", gradient, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.mirrorc, name).default


all_reduce_value = _register("all_reduce_value(Tensor value) -> Tensor", _alone, _like, _gradient_of_sum)
"""``all_reduce_value(value)``: the sum over all replicas; alone, a copy."""

all_gather_value = _register(
    "all_gather_value(Tensor value) -> Tensor", _alone, _gathered, _gradient_of_gathered, _keep_rows
)
"""``all_gather_value(value)``: the values of all replicas, along dim 0; alone, a copy."""

own_rows_of_sum = _register(
    "own_rows_of_sum(Tensor value, int rows) -> Tensor", _rows_alone, _fake_rows, _gradient_of_rows
)
"""``own_rows_of_sum(value, rows)``: this replica's rows of the sum over all replicas; transposes `all_gather_value`."""

replica_number = _register(
    "replica_number(Tensor like) -> Tensor", lambda like: torch.zeros_like(_alone(like)), torch.empty_like
)
"""``replica_number(like)``: the number of this replica; alone, 0."""

replica_count = _register(
    "replica_count(Tensor like) -> Tensor", lambda like: torch.ones_like(_alone(like)), torch.empty_like
)
"""``replica_count(like)``: the number of replicas with examples; alone, 1."""
