"""Products of factors that are not multiplied yet: what all of them together measure, and that they are finite, follows from
their factors, which have fewer elements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mirrorc.analysis.updates_in_parts import Size, elements_of_part, is_measured_by_factors
from mirrorc.runtime.state.factored_pieces import Pairs, ProductPiece
from mirrorc.runtime.state.share_pieces import FactoredBucket, Factors, Piece, Take, Visit
from mirrorc.torch_internals import norms_of_each

_SPARED = 16.0  # of the largest number: what rounding may add to a bound


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
    """One product, or a sum of them.

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


@dataclass(frozen=True)
class UnmadeProducts:
    """The products of a share that are left unmade.

    Attributes:
        products: at least one.
        whole: the memory of the bucket in which the share lies.
        bounds: the share's first element in the bucket, and the one after its last.
        visit: called with what is made in parts; see `Visit`.
    """

    products: Sequence[UnmadeProduct]
    whole: torch.Tensor
    bounds: tuple[int, int]
    visit: Visit

    def make(self) -> None:
        """Makes them."""
        for one in self.products:
            one.piece.multiply(one.pairs, self.whole[one.piece.start : one.piece.stop])

    def make_visited(self) -> None:
        """Makes and visits them part by part."""
        for one in self.products:
            one.piece.multiply_visited(one.pairs, self.whole[one.piece.start : one.piece.stop], self.visit)

    @property
    def are_most(self) -> bool:
        """Whether they have more elements than the rest of the share."""
        start, stop = self.bounds
        return 2 * sum(one.piece.stop - one.piece.start for one in self.products) > stop - start

    def largest_part(self, num_elements: int) -> int:
        """The elements of the memory that `make_parts` needs; 0 if it would make all in the bucket."""
        return max(elements_of_part(*one.size, num_elements) for one in self.products)

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

        for one in self.products:
            piece = one.piece
            if factor != 1.0:
                self.whole[end : piece.start].mul_(factor)
            if elements_of_part(*one.size, num_elements):
                take_lying(piece.start)
                piece.multiply_parts(
                    one.pairs, num_elements, memory, lambda first, part: take(first - start, part), factor
                )
            else:
                piece.multiply(one.pairs, self.whole[piece.start : piece.stop], factor)
                take_lying(piece.stop)
            end = piece.stop
        if factor != 1.0:
            self.whole[end:stop].mul_(factor)
        take_lying(stop)

    def make_scaled(self, factor: float) -> None:
        """Makes them times a finite factor, and multiplies the rest of the share by it."""
        end, stop = self.bounds
        for one in self.products:
            piece = one.piece
            if end < piece.start:
                self.whole[end : piece.start].mul_(factor)
            piece.multiply(one.pairs, self.whole[piece.start : piece.stop], factor)
            end = piece.stop
        if end < stop:
            self.whole[end:stop].mul_(factor)


def unmade_products(
    pieces: Sequence[ProductPiece], buckets: Sequence[FactoredBucket], bounds: tuple[int, int], visit: Visit
) -> UnmadeProducts:
    """Leaves pieces of a share unmade.

    Args:
        pieces: at least one.
        buckets: of all replicas, in order; the share lies in the first one's memory.
        bounds, visit: see `UnmadeProducts`.
    """
    return UnmadeProducts(
        [UnmadeProduct(piece, piece.pairs(buckets)) for piece in pieces], buckets[0].tensor, bounds, visit
    )


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


def are_finite(unmade: Iterable[UnmadeProducts]) -> bool:
    """Whether all elements of the products are known to be finite, from the norms of their factors.

    No element of ``left @ right``, and no sum on the way to it, is larger than the product of the factors' norms.
    """
    products = [one.pairs for share in unmade for one in share.products]
    norms = torch.stack(norms_of_each([factor for pairs in products for pair in pairs for factor in pair])).tolist()
    found = iter(norms)
    for pairs in products:
        bound = sum(next(found) * next(found) for _ in pairs)
        if not bound < torch.finfo(pairs[0][0].dtype).max / _SPARED:
            return False
    return True


def norm_of_products(unmade: Iterable[UnmadeProducts]) -> float | None:
    """The 2-norm of all products of 32 bits together; None if it may be inexact, or if an element may not be finite.

    The square of the norm of ``left @ right`` is the sum of the elements of ``left.T @ left`` times those of ``right @ right.T``,
    two matrices with as many rows as there are examples. Where the gradients of examples nearly cancel each other, this loses
    digits: then it is done in 64 bits, and where even these do not do, the products have to be made. All products of one shape
    are measured together, because small operators of two threads take turns with the interpreter.
    """
    groups: dict[Size, list[UnmadeProduct]] = defaultdict(list)
    for share in unmade:
        for one in share.products:
            groups[one.size].append(one)
    joined = [_join(products, *size) for size, products in groups.items()]
    bound = (torch.finfo(torch.float32).max / _SPARED) ** 2
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
