"""Shares of matrix products; each piece is a rectangle of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from mirrorc.analysis.gradients.tiled_updates import elements_of_part
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.runtime.state.shares.pieces import (
    CACHED_ELEMENTS,
    FactoredBucket,
    FactoredPiece,
    Factors,
    Take,
    Visit,
    makes_shares_of,
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

    def largest_part(self, num_elements: int, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        num_inner = sum(left.shape[1] for replica in factors for left, _ in replica[self.factored])
        return elements_of_part(*self._sizes(), num_inner, num_elements)

    def _pairs(self, factors: Sequence[Factors]) -> Pairs:
        width = self.columns.stop - self.columns.start
        return [
            (left[self.rows], right if right.shape[1] == width else right[:, self.columns]) for left, right in factors
        ]

    def temporary_bytes(self, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
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
