"""Pieces of a share: ranges of elements. Each form of gradient has a class of pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from mirrorc.ir.buckets import Slot
from mirrorc.ir.operation import Handlers

CACHED_ELEMENTS = 2**18
"""A part that stays in the cache: 1 MiB of 32-bit elements."""


@dataclass(frozen=True)
class Visit:
    """An action on each finished part of a share.

    Attributes:
        function: takes a 1-D part, without zero rows of a table.
        writes: the function may write the part; zeros must stay zero.
        defer: takes a piece that may be made later; None without deferral.
    """

    function: Callable[[torch.Tensor], object]
    writes: bool = False
    defer: Defer | None = None

    def __call__(self, part: torch.Tensor) -> None:
        self.function(part)


def scaling_by(factor: float) -> Visit:
    return Visit(lambda part: part.mul_(factor), writes=True)


def bounding_by(max_value: float) -> Visit:
    return Visit(lambda part: part.clamp_(-max_value, max_value), writes=True)


Take = Callable[[int, torch.Tensor], None]
"""Receives the index of a part's first element in the bucket, and the 1-D part."""

Factors = tuple[torch.Tensor, ...]
"""Factors of one microbatch, in the order of the form's `factor_names`."""


@dataclass(frozen=True)
class FactoredBucket:
    """A replica's bucket, 1-D. Slots of factored gradients are unwritten; ``factors`` is by gradient and microbatch."""

    tensor: torch.Tensor
    factors: Sequence[Sequence[Factors]]
    pieces: Sequence[Piece]


@dataclass
class Piece(ABC):
    """A range of a bucket that a replica computes together."""

    start: int
    stop: int

    @abstractmethod
    def make(self, buckets: Sequence[FactoredBucket], total: torch.Tensor) -> None:
        """Computes the sum over all replicas in ``total``, a 1-D part of the first replica's bucket."""

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        """Like `make`, and visits the elements in parts. A part may be visited before the next one is made."""
        self.make(buckets, total)
        self.visit_made(total, visit)

    def visit_made(self, total: torch.Tensor, visit: Visit) -> None:
        visit_parts(total, visit)

    @property
    def num_made(self) -> int:
        return self.stop - self.start

    def largest_part(self, num_elements: int, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        """Upper bound for parts of `make_parts`, in elements; 0 for a piece made in the bucket."""
        return 0

    def make_parts(
        self, buckets: Sequence[FactoredBucket], num_elements: int, memory: torch.Tensor, take: Take
    ) -> None:
        """Makes the sum in parts, in reused memory. Passes each part to ``take`` before it makes the next."""
        raise NotImplementedError(f"{type(self).__name__} is made in the bucket")

    def forget(self) -> None:  # noqa: B027 - most pieces remember nothing
        """Drops the record of writes, because the bucket may have been overwritten."""

    def temporary_bytes(self, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        return 0


@dataclass
class SumPiece(Piece):
    """Elements of whole gradients, added in the order of replicas."""

    def make(self, buckets: Sequence[FactoredBucket], total: torch.Tensor) -> None:
        for bucket in buckets[1:]:
            total.add_(bucket.tensor[self.start : self.stop])

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        add_visited(total, [bucket.tensor[self.start : self.stop] for bucket in buckets[1:]], visit)


def add_visited(total: torch.Tensor, others: Sequence[torch.Tensor], visit: Visit) -> None:
    """Adds 1-D tensors to ``total``, in order, and visits each part of the sum."""
    if total.numel() <= CACHED_ELEMENTS:  # as most are: views take as long as what is done with them
        for other in others:
            total.add_(other)
        if total.numel():
            visit(total)
        return
    for start in range(0, total.numel(), CACHED_ELEMENTS):
        part = total[start : start + CACHED_ELEMENTS]
        for other in others:
            part.add_(other[start : start + CACHED_ELEMENTS])
        visit(part)


@dataclass
class FactoredPiece(Piece):
    factored: int

    @classmethod
    @abstractmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        """Cuts a slot's elements within a share into pieces, in order and without gaps."""

    @abstractmethod
    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        """Overwrites ``total``, 1-D, with its content of the last step. ``factors`` are by replica and microbatch."""

    def make(self, buckets: Sequence[FactoredBucket], total: torch.Tensor) -> None:
        self.add_up(self.factors_in(buckets), total)

    def factors_in(self, buckets: Sequence[FactoredBucket]) -> list[Factors]:
        return [part for bucket in buckets if bucket.factors for part in bucket.factors[self.factored]]


def visit_parts(total: torch.Tensor, visit: Visit) -> None:
    for start in range(0, total.numel(), CACHED_ELEMENTS):
        visit(total[start : start + CACHED_ELEMENTS])


Defer = Callable[[FactoredPiece, Sequence[Factors], torch.Tensor], None]
"""Receives a piece, its factors and its 1-D elements, and later calls `FactoredPiece.add_up`."""

makes_shares_of: Handlers[type[FactoredPiece]] = Handlers("make shares of the gradients of")
"""The `FactoredPiece` subclass by operation of the gradient form. As a decorator, it registers a class."""
