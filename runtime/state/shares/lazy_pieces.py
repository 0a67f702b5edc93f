"""Pieces of a share that are left unmade until an update takes it: products of factors, and tables' rows that are not added.

What is asked of them before the step commits, the norm of all or whether all are finite, follows from fewer numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mirrorc.analysis.gradients.tiled_updates import elements_of_part
from mirrorc.runtime.state.shares.lazy_products import UnmadeProduct, largest_known, norm_of_products, unmade_product
from mirrorc.runtime.state.shares.lazy_tables import UnmadeTable, norm_of_tables, rows_of_tables, unmade_table
from mirrorc.runtime.state.shares.pieces import FactoredBucket, FactoredPiece, Piece, Take, Visit, scaling_by
from mirrorc.runtime.state.shares.product_pieces import ProductPiece
from mirrorc.runtime.state.shares.table_pieces import TablePiece
from mirrorc.torch_internals import norms_of_each


@dataclass(frozen=True)
class UnmadePieces:
    """What is left unmade of a share, and what is made.

    Attributes:
        products: those that are left, in order.
        tables: those that are left.
        made: the other pieces; what lies between pieces is zero.
        whole: the memory of the bucket in which the share lies.
        bounds: the share's first element in the bucket, and the one after its last.
        visit: called with what is made in parts; see `Visit`.
    """

    products: Sequence[UnmadeProduct]
    tables: Sequence[UnmadeTable]
    made: Sequence[Piece]
    whole: torch.Tensor
    bounds: tuple[int, int]
    visit: Visit

    def make(self) -> None:
        """Makes them."""
        for one in self._left:
            one.make(self.whole)

    def make_visited(self) -> None:
        """Makes and visits them part by part."""
        for one in self._left:
            one.make_visited(self.whole, self.visit)

    @property
    def rest_is_small(self) -> bool:
        """Whether to multiply what is made touches fewer elements than half of the share."""
        start, stop = self.bounds
        return 2 * sum(piece.num_made for piece in self.made) < stop - start

    def largest_part(self, num_elements: int) -> int:
        """The elements of the memory that `make_parts` needs; 0 if it would make all in the bucket."""
        return max((elements_of_part(*one.size, num_elements) for one in self.products), default=0)

    def make_scaled(self, factor: float) -> None:
        """Makes them times a finite factor, and multiplies the rest of the share by it."""
        self._scale_rest(factor)
        for one in self.products:
            one.make(self.whole, factor)

    def make_parts(self, num_elements: int, memory: torch.Tensor, factor: float, take: Take) -> None:
        """Makes them times a factor, in parts, which are taken with those of the rest of the share, in order.

        Args:
            num_elements: of a part, at most.
            memory: in which large products are made, one part after the other, 1-D; all else lies in the bucket.
            factor: a finite one.
            take: gets the first element of each part, counted from the share's, and the part.
        """
        start, stop = self.bounds
        end = start

        def take_lying(last: int) -> None:
            for first in range(end, last, num_elements):
                take(first - start, self.whole[first : min(first + num_elements, last)])

        self._scale_rest(factor)
        for one in self.products:
            piece = one.piece
            if elements_of_part(*one.size, num_elements):
                take_lying(piece.start)
                piece.multiply_parts(
                    one.pairs, num_elements, memory, lambda first, part: take(first - start, part), factor
                )
            else:
                one.make(self.whole, factor)
                take_lying(piece.stop)
            end = piece.stop
        take_lying(stop)

    @property
    def _left(self) -> Sequence[UnmadeProduct | UnmadeTable]:
        return [*self.products, *self.tables]

    def _scale_rest(self, factor: float) -> None:
        """Makes tables times a factor, and multiplies what is made already."""
        for table in self.tables:
            table.make(self.whole, factor)
        if factor != 1.0:
            for piece in self.made:
                piece.visit_made(self.whole[piece.start : piece.stop], scaling_by(factor))


def unmade_pieces(
    left: Sequence[FactoredPiece],
    made: Sequence[Piece],
    buckets: Sequence[FactoredBucket],
    bounds: tuple[int, int],
    visit: Visit,
) -> UnmadePieces:
    """Leaves pieces of a share unmade.

    Args:
        left: at least one.
        made: the others of the share.
        buckets: of all replicas, in order; the share lies in the first one's memory.
        bounds, visit: see `UnmadePieces`.
    """
    return UnmadePieces(
        [unmade_product(piece, buckets) for piece in left if isinstance(piece, ProductPiece)],
        [unmade_table(piece, buckets) for piece in left if isinstance(piece, TablePiece)],
        made,
        buckets[0].tensor,
        bounds,
        visit,
    )


def are_finite(unmade: Sequence[UnmadePieces]) -> bool:
    """Whether all elements are known to be finite, from norms of what they are made of.

    No element of ``left @ right``, and no sum on the way to it, is larger than the product of the factors' norms. No sum of
    rows has a larger element than their norm times the root of their number.
    """
    products = [one.pairs for share in unmade for one in share.products]
    rows = rows_of_tables([one for share in unmade for one in share.tables])
    measured = [factor for pairs in products for pair in pairs for factor in pair]
    found = iter(torch.stack(norms_of_each(measured + rows)).tolist())
    for pairs in products:
        if not sum(next(found) * next(found) for _ in pairs) < largest_known(pairs[0][0].dtype):
            return False
    return all(next(found) * math.sqrt(len(own)) < largest_known(own.dtype) for own in rows)


def norm_of_unmade(unmade: Iterable[UnmadePieces]) -> float | None:
    """The 2-norm of all that is left; None if it may be inexact, or if an element may not be finite."""
    shares = list(unmade)
    tables = [one for share in shares for one in share.tables]
    products = [one for share in shares for one in share.products]
    norms = [norm_of_tables(tables)] if tables else []
    if products and None not in norms:
        norms.append(norm_of_products(products))
    found = [norm for norm in norms if norm is not None]
    return math.hypot(*found) if len(found) == len(norms) else None
