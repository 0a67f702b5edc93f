"""Operators on values of all replicas. Plain PyTorch counts as one replica."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch

from mirrorc.custom_ops.registration import register

RowsOfAll = Callable[[torch.Tensor], int]
"""The total number of rows of all replicas for a gathered value."""

SUM, GATHER, ROWS_OF_SUM = "sum_over_replicas", "rows_of_replicas", "own_rows_of_sum"
"""Kinds of exchange, by the names of their operations in the IR."""


class ReplicaExchange(Protocol):
    """The values of all replicas, for a replica that runs as plain PyTorch.

    Attributes:
        count: the number of replicas with examples.
    """

    place: int
    count: int
    number: int

    def meet(self, kind: str, value: torch.Tensor, rows: int, origin: int | None) -> torch.Tensor:
        """The result of an exchange. In backward, ``origin`` is the number of its exchange in forward."""


class _Alone:
    place, count, number = 0, 1, 0

    def meet(self, kind: str, value: torch.Tensor, rows: int, origin: int | None) -> torch.Tensor:
        if kind == ROWS_OF_SUM and len(value) != rows:
            raise RuntimeError(f"own_rows_of_sum is asked for {rows} rows of {len(value)}, and there is one replica")
        return value.clone(memory_format=torch.contiguous_format)


class _Refused:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


class AlikeReplicas:
    """An exchange for a first run, in which all replicas are taken to have this one's values."""

    def __init__(self) -> None:
        self.place, self.count, self.number = 0, _count.get(), 0
        self._rows_of_all = _rows.get()

    def meet(self, kind: str, value: torch.Tensor, rows: int, origin: int | None) -> torch.Tensor:
        self.number += 1
        if kind == GATHER:
            places = torch.arange(self._rows_of_all(value), device=value.device) % max(len(value), 1)
            return value.index_select(0, places)
        return (value.narrow(0, 0, rows) if kind == ROWS_OF_SUM else value) * self.count


_rows: contextvars.ContextVar[RowsOfAll] = contextvars.ContextVar("rows", default=len)
_count: contextvars.ContextVar[int] = contextvars.ContextVar("count", default=1)
_ALONE: ReplicaExchange = _Alone()
_exchange: contextvars.ContextVar[ReplicaExchange] = contextvars.ContextVar("exchange", default=_ALONE)
_origin: contextvars.ContextVar[int | None] = contextvars.ContextVar("origin", default=None)


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def gathering(rows_of_all: RowsOfAll, num_replicas: int) -> Iterator[None]:
    """Marks a trace of one replica among several."""
    with _set(_rows, rows_of_all), _set(_count, num_replicas):
        yield


def exchanging(exchange: ReplicaExchange) -> contextlib.AbstractContextManager[None]:
    """Gives plain PyTorch in this thread the values of other replicas."""
    return _set(_exchange, exchange)


def current_exchange() -> ReplicaExchange:
    return _exchange.get()


def refused_exchange(error: Exception) -> ReplicaExchange:
    """Raises ``error`` if plain PyTorch needs values of other replicas."""
    return cast("ReplicaExchange", _Refused(error))


def _meet(kind: str, value: torch.Tensor, rows: int = 0) -> torch.Tensor:
    return _exchange.get().meet(kind, value, rows, _origin.get())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.rows, ctx.number = len(inputs[0]) if inputs[0].dim() else 0, _exchange.get().number


def _gradient_of_sum(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    with _set(_origin, ctx.number):
        return all_reduce_value(gradient)


def _gradient_of_gathered(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    with _set(_origin, ctx.number):
        return own_rows_of_sum(gradient, ctx.rows)


def _gradient_of_rows(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    with _set(_origin, ctx.number):
        return all_gather_value(gradient), None


all_reduce_value = register(
    "all_reduce_value(Tensor value) -> Tensor",
    functools.partial(_meet, SUM),
    lambda value: torch.empty_like(value, memory_format=torch.contiguous_format),
    gradient=_gradient_of_sum,
    keep=_keep,
)
"""``all_reduce_value(value)``: the sum over all replicas; a copy in plain PyTorch."""

all_gather_value = register(
    "all_gather_value(Tensor value) -> Tensor",
    functools.partial(_meet, GATHER),
    lambda value: value.new_empty((_rows.get()(value), *value.shape[1:])),
    gradient=_gradient_of_gathered,
    keep=_keep,
)
"""``all_gather_value(value)``: the values of all replicas, along dim 0; a copy in plain PyTorch."""

own_rows_of_sum = register(
    "own_rows_of_sum(Tensor value, int rows) -> Tensor",
    functools.partial(_meet, ROWS_OF_SUM),
    lambda value, rows: value.new_empty((rows, *value.shape[1:])),
    gradient=_gradient_of_rows,
    keep=_keep,
)
"""``own_rows_of_sum(value, rows)``: this replica's rows of the sum over replicas; backward of `all_gather_value`."""

replica_number = register(
    "replica_number(Tensor like) -> Tensor", lambda like: torch.full_like(like, _exchange.get().place), torch.empty_like
)
"""``replica_number(like)``: the number of this replica; 0 in plain PyTorch."""

replica_count = register(
    "replica_count(Tensor like) -> Tensor", lambda like: torch.full_like(like, _exchange.get().count), torch.empty_like
)
"""``replica_count(like)``: the number of replicas with examples; 1 in plain PyTorch."""
