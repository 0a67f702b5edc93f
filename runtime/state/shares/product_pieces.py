"""Shares of matrix products and of tables' gradients; each piece is a rectangle of a matrix."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from mirrorc.analysis.gradients.tiled_updates import elements_of_part
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.runtime.state.shares.pieces import (
    CACHED_ELEMENTS,
    AllFactors,
    FactoredBucket,
    FactoredPiece,
    Factors,
    Take,
    Visit,
    makes_shares_of,
    visit_parts,
)

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Rectangle(FactoredPiece):
    rows: slice
    columns: slice

    def _sizes(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @classmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        """Cuts a range into the end of a row, whole rows, and the beginning of a row."""
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
    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        """Concatenates factors for a single product if this moves less memory than several products."""
        joined = _joined(self._pairs(factors))
        _add_products(joined, total.view(-1, self._sizes()[1]))

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        joined, width = _joined(self._pairs(self.factors_in(buckets))), self._sizes()[1]
        num_rows = max(CACHED_ELEMENTS // width, 1)
        out = total.view(-1, width)
        for start in range(0, len(out), num_rows):
            rows = slice(start, start + num_rows)
            _add_products([(left[rows], right) for left, right in joined], out[rows])
            visit(out[rows].view(-1))

    def make_parts(
        self, buckets: Sequence[FactoredBucket], num_elements: int, memory: torch.Tensor, take: Take
    ) -> None:
        joined = _joined(self._pairs(self.factors_in(buckets)))
        all_rows, width = self._sizes()
        num_rows = num_elements // width
        for first in range(0, all_rows, num_rows):
            rows = [(left[first : first + num_rows], right) for left, right in joined]
            part = memory[: len(rows[0][0]) * width]
            _add_products(rows, part.view(-1, width))
            take(self.start + first * width, part)

    def largest_part(self, num_elements: int, factors: AllFactors) -> int:
        num_inner = sum(left.shape[1] for replica in factors for left, _ in replica[self.factored])
        return elements_of_part(*self._sizes(), num_inner, num_elements)

    def _pairs(self, factors: Sequence[Factors]) -> Pairs:
        width = self.columns.stop - self.columns.start
        return [
            (left[self.rows], right if right.shape[1] == width else right[:, self.columns]) for left, right in factors
        ]

    def temporary_bytes(self, factors: AllFactors) -> int:
        (m, n), pairs = self._sizes(), [part for replica in factors for part in replica[self.factored]]
        num_inner = sum(left.shape[1] for left, _ in pairs)
        return num_inner * (m + n) * pairs[0][0].itemsize if _is_single_product(m, n, num_inner, len(pairs)) else 0


def _joined(pairs: Pairs) -> Pairs:
    (m, _), n = pairs[0][0].shape, pairs[0][1].shape[1]
    if not _is_single_product(m, n, sum(left.shape[1] for left, _ in pairs), len(pairs)):
        return pairs
    left = torch.cat([left.t() for left, _ in pairs]).t()
    return [(left, torch.cat([right for _, right in pairs]))]


def _add_products(pairs: Pairs, out: torch.Tensor) -> None:
    torch.mm(*pairs[0], out=out)
    for left, right in pairs[1:]:
        out.addmm_(left, right)


def _is_single_product(m: int, n: int, num_inner: int, num_pairs: int) -> bool:
    return num_inner * (m + n) < m * n * (num_pairs - 1)


OwnRows = tuple[torch.Tensor, torch.Tensor]
"""Row indices in a rectangle (int64, in separate memory), and the rows to add there."""


@makes_shares_of(ops.index_add)
@dataclass
class TablePiece(Rectangle):
    """A rectangle of a table's gradient, in memory that is zero except for a step's rows.

    ``written``: the last step's row indices within the rectangle; None for unknown content.
    """

    padding_idx: int = -1
    num_rows: int = 0
    written: Sequence[torch.Tensor] | None = None

    @classmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        for piece in super().cut(slot, factored, first, last, **details):
            yield replace(piece, num_rows=slot.shape[0])

    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        self.add_rows([self._select(part) for part in factors], total)

    def add_rows(self, parts: Sequence[OwnRows], total: torch.Tensor) -> None:
        out = total.view(self._sizes()[0], -1)
        written, self.written = self.written, None
        if written is None:
            out.zero_()
        for places in written or ():
            out.index_fill_(0, places, 0.0)
        for places, rows in parts:
            out.index_add_(0, places, rows)
        self.written = [places for places, _ in parts]

    def _select(self, factors: Factors) -> OwnRows:
        rows, places = self.rows_and_places(factors)
        positions = self._positions_of_rows(places)
        if positions is None:  # the batch may be overwritten before the next step clears the rows
            return places.to(torch.int64, copy=True) - self.rows.start, rows
        return places.index_select(0, positions).long() - self.rows.start, rows.index_select(0, positions)

    def _positions_of_rows(self, places: torch.Tensor) -> torch.Tensor | None:
        conditions = [places >= self.rows.start] if self.rows.start else []
        if self.rows.stop < self.num_rows:
            conditions.append(places < self.rows.stop)
        if self.rows.start <= self.padding_idx < self.rows.stop:
            conditions.append(places != self.padding_idx)
        return functools.reduce(torch.logical_and, conditions).nonzero().squeeze(1) if conditions else None

    @property
    def num_rows_here(self) -> int:
        return self._sizes()[0]

    def rows_and_places(self, factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
        """A microbatch's rows, 2-D, and their row numbers in the table, inside this rectangle or not."""
        rows, indices = factors
        return rows.reshape(-1, rows.shape[-1])[:, self.columns], indices.reshape(-1)

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        factors = self.factors_in(buckets)
        if visit.defer is not None and self.has_few_rows(factors):
            visit.defer(self, factors, total)
        else:
            self.add_up(factors, total)
            self.visit_made(total, visit)

    def has_few_rows(self, factors: Sequence[Factors]) -> bool:
        num_added = sum(indices.numel() for _, indices in factors)
        return 0 < 2 * num_added < self.num_rows_here and factors[0][0].is_floating_point()

    def visit_made(self, total: torch.Tensor, visit: Visit) -> None:
        if 2 * self.num_made > total.numel():
            visit_parts(total, visit)
            return
        if not self.written:
            return
        places = torch.cat(list(self.written))
        out = total.view(self.rows.stop - self.rows.start, -1)
        if not visit.writes:
            visit_parts(out[places.unique()].view(-1), visit)
            return
        rows = out[places]
        visit_parts(rows.view(-1), visit)
        out.index_copy_(0, places, rows)  # a row that is there twice is written twice, with the same numbers

    @property
    def num_made(self) -> int:
        """The number of written rows; repeated rows count each time."""
        if self.written is None:
            return self.stop - self.start
        return sum(map(len, self.written)) * self._sizes()[1]

    def forget(self) -> None:
        self.written = None

    def temporary_bytes(self, factors: AllFactors) -> int:
        parts = [rows for replica_factors in factors for rows, _ in replica_factors[self.factored]]
        if (
            self.rows == slice(0, self.num_rows)
            and self.padding_idx < 0
            and all(rows.dim() == 2 or rows.is_contiguous() for rows in parts)
        ):
            return 0
        rows = max(parts, key=torch.Tensor.numel)
        return rows.numel() // len(factors) * rows.itemsize
