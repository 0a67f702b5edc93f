"""Saves data of forward runs for backward."""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

import torch

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
