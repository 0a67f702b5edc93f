"""Makes shares of gradients of mirrorc's own forms: matrix products, and gradients of embeddings' tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from mirrorc.analysis.updates_in_parts import elements_of_part
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.runtime.state.share_pieces import (
    CACHED_ELEMENTS,
    FactoredBucket,
    FactoredPiece,
    Factors,
    Take,
    Visit,
    makes_shares_of,
)


@dataclass
class Rectangle(FactoredPiece):
    """A rectangle of a matrix.

    Attributes:
        rows: of the matrix.
        columns: of the matrix.
    """

    rows: slice
    columns: slice

    def _sizes(self) -> tuple[int, int]:
        """The number of rows and that of columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @classmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        """Cuts a range of elements into the end of a row, whole rows, and the beginning of a row."""
        width = slot.shape[1]
        while first < last:
            row, column = divmod(first - slot.offset, width)
            num_rows = (last - first) // width if column == 0 else 0
            if num_rows:
                stop, rows, columns = first + num_rows * width, slice(row, row + num_rows), slice(0, width)
            else:
                stop = min(last, first - column + width)
                rows, columns = slice(row, row + 1), slice(column, column + stop - first)
            yield cls(first, stop, factored, rows, columns, **details)
            first = stop


@makes_shares_of(ops.product)
@dataclass
class ProductPiece(Rectangle):
    """A rectangle of the sum of matrix products."""

    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        """Multiplies the factors of all parts in one product, or in one product for each part, whichever moves less memory.

        One product needs a copy of all factors side by side. With several products, each one reads and writes the result.
        """
        pairs = self._pairs(factors)
        _add_products(pairs, total.view(-1, pairs[0][1].shape[1]))

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        """Multiplies and visits some rows after the other."""
        pairs = self._pairs(self.factors_in(buckets))
        width = pairs[0][1].shape[1]
        num_rows = max(CACHED_ELEMENTS // width, 1)
        out = total.view(-1, width)
        for start in range(0, len(out), num_rows):
            rows = slice(start, start + num_rows)
            _add_products([(left[rows], right) for left, right in pairs], out[rows])
            visit(out[rows].view(-1))

    def make_parts(self, buckets: Sequence[FactoredBucket], memory: torch.Tensor, take: Take) -> None:
        """Multiplies some rows after the other."""
        pairs = self._pairs(self.factors_in(buckets))
        all_rows, width = self._sizes()
        num_rows = memory.numel() // width
        for first in range(0, all_rows, num_rows):
            rows = [(left[first : first + num_rows], right) for left, right in pairs]
            part = memory[: len(rows[0][0]) * width]
            _add_products(rows, part.view(-1, width))
            take(self.start + first * width, part)

    def largest_part(self, num_elements: int, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        """See `Piece`."""
        num_inner = sum(left.shape[1] for own in factors for left, _ in own[self.factored])
        return elements_of_part(*self._sizes(), num_inner, num_elements)

    def _pairs(self, factors: Sequence[Factors]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The factors of the products that are added up, for this rectangle."""
        pairs = [(left[self.rows], right[:, self.columns]) for left, right in factors]
        (m, _), n = pairs[0][0].shape, pairs[0][1].shape[1]
        if not _is_one_product(m, n, sum(left.shape[1] for left, _ in pairs), len(pairs)):
            return pairs
        left = torch.cat([left.t() for left, _ in pairs]).t()
        return [(left, torch.cat([right for _, right in pairs]))]

    def temporary_bytes(self, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        m, n = self._sizes()
        lefts = [left for own in factors for left, _ in own[self.factored]]
        num_inner = sum(left.shape[1] for left in lefts)
        is_copied = _is_one_product(m, n, num_inner, len(lefts))
        return num_inner * (m + n) * lefts[0].itemsize if is_copied else 0


def _add_products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor) -> None:
    """Writes the sum of matrix products."""
    torch.mm(*pairs[0], out=out)
    for left, right in pairs[1:]:
        torch.addmm(out, left, right, out=out)


def _is_one_product(m: int, n: int, num_inner: int, num_pairs: int) -> bool:
    return num_inner * (m + n) < m * n * (num_pairs - 1)


@makes_shares_of(ops.index_add)
@dataclass
class TablePiece(Rectangle):
    """A rectangle of a table's gradient, in memory that is zero except for the few rows of a step.

    Attributes:
        padding_idx: the row of the table that is left out.
        takes_all: whether the rectangle is the whole table and no row is left out, so that nothing has to be selected.
        written: the rows that the last step has written, counted from the rectangle's first row, as a tensor for each part;
            None if the content of the memory is unknown.
    """

    padding_idx: int = -1
    takes_all: bool = False
    written: Sequence[torch.Tensor] | None = None

    @classmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        """As for any rectangle."""
        for piece in super().cut(slot, factored, first, last, **details):
            yield replace(piece, takes_all=last - first == slot.num_elements and piece.padding_idx < 0)

    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        """Clears the rows of the last step and adds those of this step; other rows are zero already and are not written."""
        first, last = self.rows.start, self.rows.stop
        out = total.view(last - first, -1)
        written, self.written = self.written, None
        if written is None:
            out.zero_()
        for places in written or ():
            out.index_fill_(0, places, 0.0)
        found = []
        for factor, indices in factors:
            rows, places = factor.reshape(-1, factor.shape[-1])[:, self.columns], indices.reshape(-1)
            if self.takes_all:
                places = places.to(
                    torch.int64, copy=True
                )  # the batch may be overwritten before the next step clears them
            else:
                own = ((places >= first) & (places < last) & (places != self.padding_idx)).nonzero().squeeze(1)
                rows, places = rows[own], places[own].long() - first
            out.index_add_(0, places, rows)
            found.append(places)
        self.written = found

    def forget(self) -> None:
        self.written = None

    def temporary_bytes(self, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        """The bytes of the rows that are selected from one part's; assumes that the shares get equal parts of them."""
        found = [rows for own in factors for rows, _ in own[self.factored]]
        if self.takes_all and all(rows.dim() == 2 or rows.is_contiguous() for rows in found):
            return 0
        rows = max(found, key=torch.Tensor.numel)
        return rows.numel() // len(factors) * rows.itemsize
