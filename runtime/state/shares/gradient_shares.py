"""Shares of buckets with factored gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mirrorc.analysis.gradients.factored_gradients import FactoredSlot
from mirrorc.ir.buckets import Bucket
from mirrorc.runtime.state.shares.pieces import (
    FactoredBucket,
    Factors,
    Piece,
    SumPiece,
    Take,
    Visit,
    bounding_by,
    makes_shares_of,
)


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
            pieces += makes_shares_of.of(gradient.form.operation).cut(
                slot, number_of[place], first, last, **gradient.details
            )
        elif pieces and isinstance(pieces[-1], SumPiece):
            pieces[-1] = SumPiece(pieces[-1].start, last)  # with the gap between them, which is zero
        else:
            pieces.append(SumPiece(first, last))
    return pieces


def forget_writes(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece.forget()


def make_share(buckets: Sequence[FactoredBucket], replica: int, visit: Visit | None = None) -> None:
    """Makes a share of the sum in the first replica's bucket, and visits each finished part."""
    make_pieces(buckets[replica].pieces, buckets, visit)


def make_pieces(pieces: Sequence[Piece], buckets: Sequence[FactoredBucket], visit: Visit | None = None) -> None:
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
    def _factors(self) -> list[Sequence[Sequence[Factors]]]:
        return [bucket.factors for bucket in self.buckets if bucket.factors]


def unmade_sum(tensors: Sequence[torch.Tensor], bounds: tuple[int, int]) -> UnmadeShare:
    return UnmadeShare([FactoredBucket(tensor, (), ()) for tensor in tensors], [SumPiece(*bounds)], *bounds)


def largest_part_of_share(
    pieces: Sequence[Piece],
    bounds: tuple[int, int],
    num_elements: int,
    factors: Sequence[Sequence[Sequence[Factors]]],
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
    make_share([bucket], 0)


def temporary_bytes(pieces: Sequence[Piece], factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
    """Peak temporary bytes of `make_share`. ``factors`` (maybe fake) are by replica, factored gradient and microbatch."""
    return max((piece.temporary_bytes(factors) for piece in pieces), default=0)
