"""The operations of mirrored and lowered graphs.

They are symbols: a graph names them as the target of ``call_function`` nodes, the runtime carries them out. Every
operation of a mirrored graph carries the keyword ``replica``; only collectives join replicas, and those carry the bucket
they move as a tag, so that two buckets of equal shape can never be exchanged for one another.

A pass may also put functional ATen operators between them (`is_compute`), such as a cast of a packed bucket: they belong to
the replica of what they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx


@dataclass(frozen=True)
class Pending:
    """The type of a collective's result while it is in flight; only `wait` turns it into a value.

    Attributes:
        value: the (fake) tensor that `wait` will give.
    """

    value: Any


def _symbol(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__

    def symbol(*args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{name} is an operation of the IR: only mirrorc's runtime can carry it out")

    symbol.__name__ = symbol.__qualname__ = name
    symbol.__doc__ = function.__doc__
    symbol.__module__ = function.__module__
    parameters = inspect.signature(function).parameters.values()
    _REQUIRED[symbol] = tuple(
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name != "replica"
    )
    OPERATIONS[name] = symbol
    return fx.has_side_effect(symbol) if name in _IMPURE else symbol


OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Every operation, by name."""
_REQUIRED: dict[Any, tuple[str, ...]] = {}


def required_keywords(target: Any) -> tuple[str, ...]:
    """The keywords that an operation of the IR has in every graph: all but ``replica``, which lowered ones lack."""
    return _REQUIRED.get(target, ())


_IMPURE = {
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "send",
    "recv",
    "wait",
    "update",
    "step_optimizer",
    "write",
    "store",
}


@_symbol
def argument(*, name: str, replica: int) -> Any:
    """An argument of a replica's program (a placeholder, once lowered)."""


@_symbol
def read(*, variable: str, replica: int | None = None) -> Any:
    """The value of a variable before the step's update."""


@_symbol
def slot(*, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A gradient's place in its bucket, to be written by the region that is given it."""


@_symbol
def product(left: Any, right: Any, *, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A variable's gradient as two factors, ``left @ right``: made whole by `pack`, or by each device for its share alone."""


@_symbol
def index_add(
    rows: Any, indices: Any, *, bucket: int, variable: str, padding_idx: int = -1, replica: int | None = None
) -> Any:
    """A table's gradient as two factors: ``rows`` [..., width], added up where ``indices`` [...] say, and zero elsewhere.

    What is to be added at ``padding_idx`` is left out. As of `product`, it is for `pack` or the devices' shares to make it.
    """


@_symbol
def call_region(*args: Any, region: str, gradients: dict[str, int], replica: int | None = None) -> Any:
    """Runs a region; yields the tuple of its outputs, of which ``gradients`` names those of variables: name to place."""


@_symbol
def pack(*gradients: Any, bucket: int, replica: int) -> Any:
    """Puts gradients into their slots of the bucket, in the order of the slots; yields the bucket."""


@_symbol
def all_reduce(*buckets: Any, bucket: int, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all replicas; takes every replica's bucket (one, once lowered)."""


@_symbol
def reduce_scatter(*buckets: Any, bucket: int, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all replicas, of which each gets its own share."""


@_symbol
def broadcast(*values: Any, bucket: int, root: int, link: str | None = None) -> Any:
    """Launches the copy of a bucket's parameters from replica ``root`` to all, after ``values`` are there."""


@_symbol
def send(value: Any, *, bucket: int, destination: int, replica: int, link: str) -> None:
    """Offers a bucket's parameters, once ``value`` is there, to replica ``destination``, and goes on."""


@_symbol
def recv(*, bucket: int, source: int, replica: int, link: str) -> Any:
    """Launches the receipt of a bucket's parameters from replica ``source``."""


@_symbol
def wait(pending: Pending, *, bucket: int, replica: int) -> Any:
    """Turns a pending value into a tensor, once per replica."""


@_symbol
def update(gradient: Any, *, bucket: int, replica: int) -> None:
    """Applies the optimizer to a bucket's parameters, or to the replica's share of them, element by element."""


@_symbol
def step_optimizer(*gradients: Any, buckets: tuple[int, ...], replica: int) -> Any:
    """Lets the user's optimizer update the parameters of these buckets by itself; yields a token."""


@_symbol
def store(value: Any, *, bucket: int, replica: int) -> None:
    """Writes a bucket's parameters."""


@_symbol
def write(value: Any, *, variable: str, replica: int) -> None:
    """Writes a per-replica variable, such as BatchNorm's statistics, at the end of the step."""


FACTORED = (product, index_add)
"""What gives a gradient as two factors."""

REDUCTIONS = (all_reduce, reduce_scatter)
COLLECTIVES = (*REDUCTIONS, broadcast)
LAUNCHES = (*COLLECTIVES, recv)
"""What gives a pending value."""


VIEWS = (
    torch.ops.aten.t.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
)
"""Operators that give the elements of their first argument, in another shape or order."""
