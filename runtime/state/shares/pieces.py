"""Shares of buckets, and their pieces: ranges of elements. Each form of gradient has a class of pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from mirrorc.analysis.gradients.factored_gradients import FactoredSlot
from mirrorc.ir.buckets import Bucket, Slot
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

AllFactors = Sequence[Sequence[Sequence[Factors]]]
"""Factors by replica, factored gradient and microbatch; maybe fake."""


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

    def largest_part(self, num_elements: int, factors: AllFactors) -> int:
        """Upper bound for parts of `make_parts`, in elements; 0 for a piece made in the bucket."""
        return 0

    def make_parts(
        self, buckets: Sequence[FactoredBucket], num_elements: int, memory: torch.Tensor, take: Take
    ) -> None:
        """Makes the sum in parts, in reused memory. Passes each part to ``take`` before it makes the next."""
        raise NotImplementedError(f"{type(self).__name__} is made in the bucket")

    def forget(self) -> None:  # noqa: B027 - most pieces remember nothing
        """Drops the record of writes, because the bucket may have been overwritten."""

    def temporary_bytes(self, factors: AllFactors) -> int:
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


def pieces_of_share(bucket: Bucket, factored: Sequence[FactoredSlot], replica: int, num_replicas: int) -> list[Piece]:
    start, stop = bucket.made(replica, num_replicas)
    number_of = {slot.place: number for number, slot in enumerate(factored)}
    pieces: list[Piece] = []
    for place, slot in enumerate(bucket.slots):
        first, last = max(start, slot.offset), min(stop, slot.offset + slot.num_elements)
        if first >= last:
            continue
        if place in number_of:
            gradient = factored[number_of[place]]
            cut = makes_shares_of.of(gradient.form.operation).cut
            pieces += cut(slot, number_of[place], first, last, **gradient.details)
        elif pieces and isinstance(pieces[-1], SumPiece):
            pieces[-1] = SumPiece(pieces[-1].start, last)  # with the gap between them, which is zero
        else:
            pieces.append(SumPiece(first, last))
    return pieces


def forget_writes(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece.forget()


def make_pieces(pieces: Sequence[Piece], buckets: Sequence[FactoredBucket], visit: Visit | None = None) -> None:
    """Makes a share of the sum in the first replica's bucket, and visits each finished part."""
    first = buckets[0].tensor
    for piece in pieces:
        total = first[piece.start : piece.stop]
        if visit is None:
            piece.make(buckets, total)
        else:
            piece.make_visited(buckets, total, visit)


@dataclass(frozen=True)
class MadeShare:
    """A finished share in memory. ``pieces`` is empty if the share's content is unknown."""

    pieces: Sequence[Piece] = ()
    start: int = 0

    def visit(self, share: torch.Tensor, visit: Visit) -> bool:
        """Visits this step's elements if they are less than half of the share. Returns True if so."""
        if not self.pieces or 2 * sum(piece.num_made for piece in self.pieces) >= share.numel():
            return False
        for piece in self.pieces:
            piece.visit_made(share[piece.start - self.start : piece.stop - self.start], visit)
        return True


@dataclass(frozen=True)
class UnmadeShare:
    """A share of a sum that is not computed yet; its inputs are complete.

    Attributes:
        buckets: of all participating replicas. The sum is made in the first one, except for parts in other memory.
        start, stop: the share's elements. Pieces leave out gaps between slots.
        change: applied to each finished part.
    """

    buckets: Sequence[FactoredBucket]
    pieces: Sequence[Piece]
    start: int
    stop: int
    change: Visit | None = None

    def bounded(self, max_value: float) -> UnmadeShare:
        return replace(self, change=bounding_by(max_value))

    def largest_part(self, num_elements: int) -> int:
        """Elements of memory for `make_parts`; 0 if all parts are made in the bucket."""
        return max((piece.largest_part(num_elements, self._factors) for piece in self.pieces), default=0)

    def make(self) -> torch.Tensor:
        make_pieces(self.pieces, self.buckets, self.change)
        return self.buckets[0].tensor[self.start : self.stop]

    def make_parts(self, num_elements: int, memory: torch.Tensor, take: Take) -> None:
        whole, start = self.buckets[0].tensor, self.start
        waiting = start  # the first pending element in the bucket

        def take_waiting(stop: int) -> None:
            for first in range(waiting, stop, num_elements):
                take(first - start, whole[first : min(first + num_elements, stop)])

        def take_made(first: int, part: torch.Tensor) -> None:
            if self.change is not None:
                self.change(part)
            take(first - start, part)

        for piece in self.pieces:
            if piece.largest_part(num_elements, self._factors):
                take_waiting(piece.start)
                piece.make_parts(self.buckets, num_elements, memory, take_made)
                waiting = piece.stop
            else:
                make_pieces([piece], self.buckets, self.change)
        take_waiting(self.stop)

    @property
    def _factors(self) -> AllFactors:
        return [bucket.factors for bucket in self.buckets if bucket.factors]


def unmade_sum(tensors: Sequence[torch.Tensor], bounds: tuple[int, int]) -> UnmadeShare:
    return UnmadeShare([FactoredBucket(tensor, (), ()) for tensor in tensors], [SumPiece(*bounds)], *bounds)


def largest_part_of_share(
    pieces: Sequence[Piece], bounds: tuple[int, int], num_elements: int, factors: AllFactors
) -> int:
    (waiting, stop), largest = bounds, 0
    for piece in pieces:
        if part := piece.largest_part(num_elements, factors):
            largest, waiting = max(largest, part, min(num_elements, piece.start - waiting)), piece.stop
    return max(largest, min(num_elements, stop - waiting))


def make_whole(bucket: FactoredBucket, *, is_summed: bool) -> None:
    """Computes one replica's gradients in its own bucket. ``is_summed``: other replicas' gradients are added later."""
    if is_summed:
        forget_writes(bucket.pieces)
    make_pieces(bucket.pieces, [bucket])


def temporary_bytes(pieces: Sequence[Piece], factors: AllFactors) -> int:
    """Peak temporary bytes of `make_pieces`."""
    return max((piece.temporary_bytes(factors) for piece in pieces), default=0)
