"""Products of factors that are not multiplied yet: what all of them together measure follows from their factors, which have
fewer elements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mirrorc.analysis.gradients.tiled_updates import Size, is_measured_by_factors
from mirrorc.runtime.state.shares.pieces import FactoredBucket, Factors, Piece, Visit
from mirrorc.runtime.state.shares.product_pieces import Pairs, ProductPiece

_SPARED = 16.0  # of the largest number: what rounding may add to a bound


def largest_known(dtype: torch.dtype) -> float:
    """What a bound of numbers must be less than, so that all of them are known to be finite."""
    return torch.finfo(dtype).max / _SPARED


@dataclass(frozen=True)
class _Precision:
    """How sums of squares are computed, and when their rounding does not matter.

    Attributes:
        dtype: of the factors' products.
        most_cancelled: how many times larger than the sum its terms may be together.
        smallest: how small the sum may be against the squares of the factors, some of which are rounded to zero.
    """

    dtype: torch.dtype
    most_cancelled: float
    smallest: float


_PRECISIONS = (_Precision(torch.float32, 2.0**4, 2.0**-80), _Precision(torch.float64, 2.0**24, 0.0))


@dataclass
class UnmadeProduct:
    """A product that is not made, or a sum of them.

    Attributes:
        piece: whose elements it is.
        pairs: the factors; those of all parts may have been joined to one pair.
    """

    piece: ProductPiece
    pairs: Pairs

    @property
    def size(self) -> Size:
        """See `ProductPiece.size`."""
        return self.pairs[0][0].shape[0], self.pairs[0][1].shape[1], sum(left.shape[1] for left, _ in self.pairs)

    def make(self, whole: torch.Tensor, factor: float = 1.0) -> None:
        """Makes it in the bucket, times a factor."""
        self.piece.multiply(self.pairs, whole[self.piece.start : self.piece.stop], factor)

    def make_visited(self, whole: torch.Tensor, visit: Visit) -> None:
        """Makes it in the bucket, and visits it part by part."""
        self.piece.multiply_visited(self.pairs, whole[self.piece.start : self.piece.stop], visit)


def unmade_product(piece: ProductPiece, buckets: Sequence[FactoredBucket]) -> UnmadeProduct:
    """Leaves a piece unmade; ``buckets`` as `Piece.make` takes them."""
    return UnmadeProduct(piece, piece.pairs(buckets))


def bytes_to_measure(pieces: Iterable[Piece], factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
    """The bytes that a share's factors take when they are joined to be measured, until it is made; while they are measured,
    twice as many more, if 32 bits do not do.

    Args:
        pieces: of the share.
        factors: as `Piece.temporary_bytes`.
    """
    total = 0
    for piece in pieces:
        if isinstance(piece, ProductPiece):
            own = [part for replica in factors for part in replica[piece.factored]]
            m, n, k = piece.size(own)
            if is_measured_by_factors((m, n, k), own[0][0].dtype):
                total += k * (m + n) * own[0][0].itemsize
    return total


def norm_of_products(unmade: Iterable[UnmadeProduct]) -> float | None:
    """The 2-norm of all products of 32 bits together; None if it may be inexact, or if an element may not be finite.

    The square of the norm of ``left @ right`` is the sum of the elements of ``left.T @ left`` times those of ``right @ right.T``,
    two matrices with as many rows as there are examples. Where the gradients of examples nearly cancel each other, this loses
    digits: then it is done in 64 bits, and where even these do not do, the products have to be made. All products of one shape
    are measured together, because small operators of two threads take turns with the interpreter.
    """
    groups: dict[Size, list[UnmadeProduct]] = defaultdict(list)
    for one in unmade:
        groups[one.size].append(one)
    joined = [_join(products, *size) for size, products in groups.items()]
    bound = largest_known(torch.float32) ** 2
    for precision in _PRECISIONS:
        rows = torch.stack(
            [_squares(lefts.to(precision.dtype), rights.to(precision.dtype)) for lefts, rights in joined]
        )
        *sums, largest = zip(*rows.tolist(), strict=True)
        total, of_terms, of_factors = map(math.fsum, sums)
        is_exact = total * precision.most_cancelled > of_terms and total > precision.smallest * of_factors
        if is_exact and all(square < bound for square in largest):
            return math.sqrt(total)
    return None


def _join(products: Sequence[UnmadeProduct], m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the factors of products of one shape together, of which they are then made: [products, k, m], [products, k, n]."""
    lefts = torch.cat([left.t() for one in products for left, _ in one.pairs]).view(-1, k, m)
    rights = torch.cat([right for one in products for _, right in one.pairs]).view(-1, k, n)
    for one, left, right in zip(products, lefts.mT.unbind(), rights.unbind(), strict=True):
        one.pairs = [(left, right)]
    return lefts, rights


def _squares(lefts: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
    """Sums over products of one shape: of their squared elements, of the sizes of the terms of these sums, and of their factors'
    squares; and the square of what no element is larger than. A NaN in them fails every comparison."""
    (num, k, _), dtype = lefts.shape, lefts.dtype
    squares = torch.empty(2, num, k, k, dtype=dtype)
    torch.bmm(lefts, lefts.mT, out=squares[0])
    torch.bmm(rights, rights.mT, out=squares[1])
    squares = squares.double()
    terms, of_factors = squares[0] * squares[1], squares.diagonal(dim1=2, dim2=3).sum(2)
    return torch.stack((terms.sum(), terms.abs().sum(), of_factors.sum(), of_factors.prod(0).max()))
