"""Registers operators of mirrorc with torch, and saves data of forward runs for backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")
FIXED_STRIDES = (torch.Tag.needs_fixed_stride_order,)


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: Sequence[torch.Tag] = (),
    gradient: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
) -> Any:
    """``fake`` runs the operator on fake tensors; ``gradient`` is its backward, for which ``keep`` saves inputs."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mirrorc::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"mirrorc::{name}", gradient, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.mirrorc, name).default


_Record = TypeVar("_Record")


class RunTokens(Generic[_Record]):
    """Data by token, an int64 scalar on the CPU; it lives as long as the token."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._numbers = itertools.count()

    def add(self, record: _Record) -> torch.Tensor:
        number = next(self._numbers)
        token = torch.tensor(number, dtype=torch.int64)
        self._records[number] = record
        weakref.finalize(token, self._records.pop, number, None)
        return token

    def __getitem__(self, token: torch.Tensor) -> _Record:
        return self._records[int(token)]

    def __setitem__(self, token: torch.Tensor, record: _Record) -> None:
        self._records[int(token)] = record

    def __len__(self) -> int:
        return len(self._records)
