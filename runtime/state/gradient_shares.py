"""Shares of buckets in which some gradients are left as factors: each device makes the elements that it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mirrorc.analysis.factored_gradients import FactoredSlot
from mirrorc.analysis.updates_in_parts import Size
from mirrorc.ir.buckets import Bucket
from mirrorc.runtime.state.factored_pieces import ProductPiece
from mirrorc.runtime.state.share_pieces import (
    FactoredBucket,
    Factors,
    Piece,
    SumPiece,
    Take,
    Visit,
    makes_shares_of,
)

Leaves = Callable[[Size, torch.dtype], bool]
"""Says whether a product of that size and type is left unmade."""


def pieces_of_share(bucket: Bucket, factored: Sequence[FactoredSlot], replica: int, num_replicas: int) -> list[Piece]:
    """The pieces of which what a replica makes of a bucket consists, in order.

    Args:
        bucket: the plan.
        factored: the slots whose gradients are left as factors, in order.
        replica: whose share.
        num_replicas: number of shares.

    Raises:
        LookupError: no class makes shares of a gradient's form.
    """
    start, stop = bucket.made(replica, num_replicas)
    number_of = {slot.place: number for number, slot in enumerate(factored)}
    pieces: list[Piece] = []
    for place, slot in enumerate(bucket.slots):
        first, last = max(start, slot.offset), min(stop, slot.offset + slot.num_elements)
        if first >= last:
            continue
        if place in number_of:
            own = factored[number_of[place]]
            pieces += makes_shares_of.of(own.form.operation).cut(slot, number_of[place], first, last, **own.details)
        elif pieces and isinstance(pieces[-1], SumPiece):
            pieces[-1] = SumPiece(pieces[-1].start, last)  # with the gap between them, which is zero
        else:
            pieces.append(SumPiece(first, last))
    return pieces


def forget_what_is_written(pieces: Sequence[Piece]) -> None:
    """Makes the next step write shares completely, because the buckets may have been overwritten."""
    for piece in pieces:
        piece.forget()


def make_share(
    buckets: Sequence[FactoredBucket], replica: int, visit: Visit | None = None, leaves: Leaves | None = None
) -> list[ProductPiece]:
    """Makes a replica's share of the sum over all replicas, in the first one's bucket; added in order of replicas.

    Args:
        buckets: of all replicas, in order.
        replica: whose share.
        visit: called with each part of the share when it is made, in order.
        leaves: says which products are left unmade; None for none.

    Returns:
        These products.
    """
    made: list[Piece] = []
    dtype = buckets[replica].tensor.dtype
    left: list[ProductPiece] = []
    for piece in buckets[replica].pieces:
        if (
            leaves is not None
            and isinstance(piece, ProductPiece)
            and leaves(piece.size(piece.factors_in(buckets)), dtype)
        ):
            left.append(piece)
        else:
            made.append(piece)
    make_pieces(made, buckets, visit)
    return left


def make_pieces(pieces: Sequence[Piece], buckets: Sequence[FactoredBucket], visit: Visit | None = None) -> None:
    """Makes pieces of the sum over replicas, in the first bucket's memory; as `make_share`."""
    first = buckets[0].tensor
    for piece in pieces:
        total = first[piece.start : piece.stop]
        if visit is None:
            piece.make(buckets, total)
        else:
            piece.make_visited(buckets, total, visit)


@dataclass(frozen=True)
class UnmadeShare:
    """A share of a sum of which all is there that it is made of.

    Attributes:
        buckets: of all replicas that take part, in order; in the memory of the first one lies what is not made in parts.
        pieces: of the share.
        start, stop: its elements in the bucket; those between and behind slots, which are zero, are in no piece.
    """

    buckets: Sequence[FactoredBucket]
    pieces: Sequence[Piece]
    start: int
    stop: int

    def largest_part(self, num_elements: int) -> int:
        """The elements of the memory that `make_parts` needs; 0 if it would make all in the bucket."""
        return max((piece.largest_part(num_elements, self._factors) for piece in self.pieces), default=0)

    def make(self) -> torch.Tensor:
        """Makes the share in the bucket."""
        make_pieces(self.pieces, self.buckets)
        return self.buckets[0].tensor[self.start : self.stop]

    def make_parts(self, num_elements: int, memory: torch.Tensor, take: Take) -> None:
        """Makes the share in parts, in order, and has each taken before the next one is made.

        Args:
            num_elements: of a part, at most.
            memory: in which large products are made, one part after the other, 1-D; all else is made in the bucket.
            take: gets the first element of each part, counted from the share's, and the part.
        """
        whole, start = self.buckets[0].tensor, self.start
        waiting = start  # the first element that lies in the bucket, and is not taken

        def take_waiting(stop: int) -> None:
            for first in range(waiting, stop, num_elements):
                take(first - start, whole[first : min(first + num_elements, stop)])

        for piece in self.pieces:
            if piece.largest_part(num_elements, self._factors):
                take_waiting(piece.start)
                piece.make_parts(self.buckets, num_elements, memory, lambda first, part: take(first - start, part))
                waiting = piece.stop
            else:
                piece.make(self.buckets, whole[piece.start : piece.stop])
        take_waiting(self.stop)

    @property
    def _factors(self) -> list[Sequence[Sequence[Factors]]]:
        return [bucket.factors for bucket in self.buckets if bucket.factors]


def largest_part_of_share(
    pieces: Sequence[Piece],
    bounds: tuple[int, int],
    num_elements: int,
    factors: Sequence[Sequence[Sequence[Factors]]],
) -> int:
    """The elements of the largest part that `UnmadeShare.make_parts` has taken.

    Args:
        pieces: of the share.
        bounds: the share's first element in the bucket, and the one after its last.
        num_elements: of the memory for parts.
        factors: as for `temporary_bytes`.
    """
    (waiting, stop), largest = bounds, 0
    for piece in pieces:
        if part := piece.largest_part(num_elements, factors):
            largest, waiting = max(largest, part, min(num_elements, piece.start - waiting)), piece.stop
    return max(largest, min(num_elements, stop - waiting))


def make_whole(bucket: FactoredBucket, *, is_summed: bool) -> None:
    """Makes one replica's factored gradients in its own bucket; its pieces must cover the whole bucket.

    Args:
        bucket: the replica's.
        is_summed: whether others' gradients are added to the bucket afterwards, so that it holds more than the last step made.
    """
    if is_summed:
        forget_what_is_written(bucket.pieces)
    make_share([bucket], 0)


def temporary_bytes(pieces: Sequence[Piece], factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
    """The most temporary bytes that `make_share` allocates.

    Args:
        pieces: of the share.
        factors: of each replica with examples, of the bucket's gradients as factors, of each part; tensors may be fake.
    """
    return max((piece.temporary_bytes(factors) for piece in pieces), default=0)
