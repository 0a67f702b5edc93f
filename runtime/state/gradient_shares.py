"""Shares of buckets of which some gradients are still two factors: each device makes the rows that it updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import stays_factored

Factors = tuple[torch.Tensor, torch.Tensor]
"""[m, k] and [k, n], whose product is a gradient [m, n]; or rows [..., n] of a table [m, n] and their places [...]."""


@dataclass(frozen=True)
class FactoredSlot:
    """A slot whose gradient is left as two factors.

    Attributes:
        place: its number among the bucket's slots; the slot is a contiguous matrix.
        is_table: whether the factors are rows and the places at which they are added up; else they are multiplied.
        padding_idx: of a table, the row that is left out.
    """

    place: int
    is_table: bool = False
    padding_idx: int = -1


def factored_slots(pack: fx.Node) -> list[FactoredSlot]:
    """The slots of a packed bucket whose gradients are left as two factors."""
    return [
        FactoredSlot(place, gradient.target is ops.index_add, gradient.kwargs.get("padding_idx", -1))  # type: ignore[union-attr, arg-type]
        for place, gradient in enumerate(pack.args)
        if stays_factored(gradient)
    ]


def is_left_to_shares(pack: fx.Node) -> bool:
    """Whether all that takes a packed bucket makes shares of it, in the memory that replicas share."""
    return all(u.target is ops.reduce_scatter and link_named(u.kwargs["link"]).reads_one_memory for u in pack.users)


@dataclass(frozen=True)
class _Sum:
    """Elements of the bucket that are added up over replicas."""

    start: int
    stop: int


@dataclass
class _Rectangle:
    """Elements of the bucket that are a rectangle of a gradient: which of the factored ones, and its rows and columns."""

    start: int
    stop: int
    factored: int
    rows: slice
    columns: slice


@dataclass
class _Product(_Rectangle):
    """A rectangle of a matrix product."""


@dataclass
class _Table(_Rectangle):
    """A rectangle of a table's gradient, in memory that stays zero but for the few rows of a step.

    Attributes:
        padding_idx: see `FactoredSlot`.
        written: the rows that the last step added to, counted from the rectangle's first, a tensor for each replica; None if
            it is not known what the memory holds.
    """

    padding_idx: int = -1
    written: Sequence[torch.Tensor] | None = None


Piece = _Sum | _Product | _Table


@dataclass(frozen=True)
class FactoredBucket:
    """A replica's bucket, in which some gradients are not made yet.

    Attributes:
        tensor: the bucket, 1-D; the factored slots in it are not written.
        factors: of the factored gradients, in order of their slots.
        pieces: what the replica's share consists of.
    """

    tensor: torch.Tensor
    factors: Sequence[Factors]
    pieces: Sequence[Piece]


def pieces_of_share(bucket: Bucket, factored: Sequence[FactoredSlot], replica: int, num_replicas: int) -> list[Piece]:
    """What a replica has to make of its share of a bucket.

    Args:
        bucket: the plan.
        factored: the slots whose gradients are two factors, in order.
        replica: whose share.
        num_replicas: number of shares.
    """
    start, stop = bucket.share(replica, num_replicas)
    number_of = {slot.place: number for number, slot in enumerate(factored)}
    pieces: list[Piece] = []
    for place, slot in enumerate(bucket.slots):
        first, last = max(start, slot.offset), min(stop, slot.offset + slot.num_elements)
        if first >= last:
            continue
        if place in number_of:
            pieces += _rectangles(slot, number_of[place], factored[number_of[place]], first, last)
        elif pieces and isinstance(pieces[-1], _Sum):
            pieces[-1] = _Sum(pieces[-1].start, last)  # with the gap between them, which is zero
        else:
            pieces.append(_Sum(first, last))
    return pieces


def _rectangles(slot: Slot, number: int, kind: FactoredSlot, first: int, last: int) -> Iterator[_Product | _Table]:
    """Elements of a matrix that follow each other, as rectangles: the end of a row, whole rows, the beginning of a row."""
    width = slot.shape[1]
    while first < last:
        row, column = divmod(first - slot.offset, width)
        num_rows = (last - first) // width if column == 0 else 0
        if num_rows:
            stop, rows, columns = first + num_rows * width, slice(row, row + num_rows), slice(0, width)
        else:
            stop = min(last, first - column + width)
            rows, columns = slice(row, row + 1), slice(column, column + stop - first)
        if kind.is_table:
            yield _Table(first, stop, number, rows, columns, kind.padding_idx)
        else:
            yield _Product(first, stop, number, rows, columns)
        first = stop


def forget_what_is_written(pieces: Sequence[Piece]) -> None:
    """Makes shares be written whole next time: something else may have written to the bucket."""
    for piece in pieces:
        if isinstance(piece, _Table):
            piece.written = None


def make_share(buckets: Sequence[FactoredBucket], replica: int) -> None:
    """Makes a replica's share of the sum over all replicas, in the first one's bucket; added in order of replicas.

    Args:
        buckets: of all replicas, in order.
        replica: whose share.
    """
    first, *others = (bucket.tensor for bucket in buckets)
    for piece in buckets[replica].pieces:
        total = first[piece.start : piece.stop]
        if isinstance(piece, _Sum):
            for other in others:
                total.add_(other[piece.start : piece.stop])
            continue
        pairs = [bucket.factors[piece.factored] for bucket in buckets]
        if isinstance(piece, _Table):
            _add_rows(piece, pairs, total)
        else:
            _multiply([(left[piece.rows], right[:, piece.columns]) for left, right in pairs], total)


def make_whole(
    tensor: torch.Tensor, bucket: Bucket, factored: Sequence[FactoredSlot], factors: Sequence[Factors]
) -> None:
    """Makes one replica's factored gradients in its bucket, whatever is there."""
    make_share([FactoredBucket(tensor, factors, pieces_of_share(bucket, factored, 0, 1))], 0)


def _add_rows(piece: _Table, pairs: Sequence[Factors], flat: torch.Tensor) -> None:
    """The sum of rows at their places, into 1-D memory; of what is zero already, nothing is touched."""
    first, last = piece.rows.start, piece.rows.stop
    out = flat.view(last - first, -1)
    written, piece.written = piece.written, None
    if written is None:
        out.zero_()
    for places in written or ():
        out.index_fill_(0, places, 0.0)
    found = []
    for rows, indices in pairs:
        places = indices.reshape(-1)
        is_own = (places >= first) & (places < last) & (places != piece.padding_idx)
        own = is_own.nonzero().squeeze(1)
        found.append(places[own].long() - first)
        out.index_add_(0, found[-1], rows.reshape(-1, rows.shape[-1])[:, piece.columns][own])
    piece.written = found


def _multiply(pairs: Sequence[Factors], flat: torch.Tensor) -> None:
    """The sum of products ``left @ right``, into 1-D memory.

    One product of all factors side by side, where copying them together is less to move than reading and writing the result
    once more for each replica; else one after the other.
    """
    (m, _), n = pairs[0][0].shape, pairs[0][1].shape[1]
    out, num_inner = flat.view(m, n), sum(left.shape[1] for left, _ in pairs)
    if _is_one_product(m, n, num_inner, len(pairs)):
        left = torch.cat([left.t() for left, _ in pairs]).t()
        torch.mm(left, torch.cat([right for _, right in pairs]), out=out)
        return
    torch.mm(*pairs[0], out=out)
    for left, right in pairs[1:]:
        torch.addmm(out, left, right, out=out)


def _is_one_product(m: int, n: int, num_inner: int, num_pairs: int) -> bool:
    return num_inner * (m + n) < m * n * (num_pairs - 1)


def copied_elements(pieces: Sequence[Piece], factors: Sequence[Sequence[Factors]]) -> int:
    """How many elements `make_share` copies at once: factors that it puts side by side, and rows that fall into the share.

    Of a replica's rows, a share is taken to get an even part.

    Args:
        pieces: of the share.
        factors: of each replica, of the factored gradients; only their shapes are looked at.
    """
    copied = [0]
    for piece in pieces:
        if isinstance(piece, _Product):
            m, n = (part.stop - part.start for part in (piece.rows, piece.columns))
            num_inner = sum(own[piece.factored][0].shape[1] for own in factors)
            copied.append(num_inner * (m + n) if _is_one_product(m, n, num_inner, len(factors)) else 0)
        elif isinstance(piece, _Table):
            copied.append(max(own[piece.factored][0].numel() for own in factors) // len(factors))
    return max(copied)
