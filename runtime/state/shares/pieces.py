"""Pieces of a replica's share of a bucket: ranges of elements, each made by the class for its form of gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from mirrorc.ir.buckets import Slot
from mirrorc.ir.operation import Handlers

CACHED_ELEMENTS = 2**18
"""As many elements as a processor keeps at hand, 1 MiB of 32 bits each: what is done with them next need not fetch them."""


@dataclass(frozen=True)
class Visit:
    """What is done with each part of a share as soon as it is made: it is measured, or changed where it lies.

    Attributes:
        function: takes a part, 1-D. Rows of a table that are zero are left out. A part that is only looked at stays as it is
            until the step commits.
        writes: whether the function may write the part; it leaves zeros as they are.
        defer: takes a piece that need not be made yet; None if all are made.
    """

    function: Callable[[torch.Tensor], object]
    writes: bool = False
    defer: Defer | None = None

    def __call__(self, part: torch.Tensor) -> None:
        """Visits a part."""
        self.function(part)


def scaling_by(factor: float) -> Visit:
    """Multiplies parts by a finite factor."""
    return Visit(lambda part: part.mul_(factor), writes=True)


def bounding_by(max_value: float) -> Visit:
    """Brings the elements of parts to between ``-max_value`` and ``max_value``."""
    return Visit(lambda part: part.clamp_(-max_value, max_value), writes=True)


Take = Callable[[int, torch.Tensor], None]
"""What is done with each part of a share: it is given the part's first element, counted from the bucket's, and the part, 1-D."""

Factors = tuple[torch.Tensor, ...]
"""The factors of a gradient, or of one of its parts, in the order of its form's `factor_names`."""


@dataclass(frozen=True)
class FactoredBucket:
    """A replica's bucket, in which some gradients are not made yet.

    Attributes:
        tensor: the bucket, 1-D; the slots of gradients as factors are not written.
        factors: the factors of each part of these gradients, in order of their slots; none on a replica without examples.
        pieces: the pieces of which the replica's share consists.
    """

    tensor: torch.Tensor
    factors: Sequence[Sequence[Factors]]
    pieces: Sequence[Piece]


@dataclass
class Piece(ABC):
    """A range of a bucket's elements that a replica makes together.

    Attributes:
        start: the first element, counted from the bucket's first.
        stop: the one after the last.
    """

    start: int
    stop: int

    @abstractmethod
    def make(self, buckets: Sequence[FactoredBucket], total: torch.Tensor) -> None:
        """Makes the sum over all replicas.

        Args:
            buckets: of all replicas, in order.
            total: the elements in the first replica's bucket, 1-D, to be written.
        """

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        """As `make`; then visits the elements in parts, in order. Subclasses may visit a part before they make the next one."""
        self.make(buckets, total)
        self.visit_made(total, visit)

    def visit_made(self, total: torch.Tensor, visit: Visit) -> None:
        """Visits what was made in this step, in parts, in order."""
        visit_parts(total, visit)

    @property
    def num_made(self) -> int:
        """How many elements `visit_made` visits, at most."""
        return self.stop - self.start

    def largest_part(self, num_elements: int, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        """The elements that `make_parts` makes at a time, at most; 0 if it is not to make them.

        Args:
            num_elements: as for `make_parts`.
            factors: as for `temporary_bytes`.
        """
        return 0

    def make_parts(
        self, buckets: Sequence[FactoredBucket], num_elements: int, memory: torch.Tensor, take: Take
    ) -> None:
        """Makes the sum in parts, in order, all in the same memory, and has each taken before the next one is made.

        Args:
            buckets: of all replicas, in order.
            num_elements: of a part, at most.
            memory: 1-D; of `largest_part` elements or more.
            take: see `Take`.
        """
        raise NotImplementedError(f"{type(self).__name__} is made in the bucket")

    def forget(self) -> None:  # noqa: B027 - most pieces remember nothing
        """Forgets what earlier steps have written, because the bucket may have been overwritten since."""

    def temporary_bytes(self, factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
        """The most temporary bytes that `make` allocates.

        Args:
            factors: of each replica with examples, of the bucket's gradients as factors, of each part; tensors may be fake.
        """
        return 0


@dataclass
class SumPiece(Piece):
    """Elements of whole gradients, which are added up in the order of replicas."""

    def make(self, buckets: Sequence[FactoredBucket], total: torch.Tensor) -> None:
        for bucket in buckets[1:]:
            total.add_(bucket.tensor[self.start : self.stop])

    def make_visited(self, buckets: Sequence[FactoredBucket], total: torch.Tensor, visit: Visit) -> None:
        """Adds up and visits a part after the other."""
        others = [bucket.tensor[self.start : self.stop] for bucket in buckets[1:]]
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
    """Elements of a gradient that is left as factors; each form of gradient has a subclass.

    Attributes:
        factored: the index of the gradient among the bucket's factored gradients.
    """

    factored: int

    @classmethod
    @abstractmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        """Cuts those elements of a slot that fall into a share into pieces, in order and without gaps.

        Args:
            slot: the slot.
            factored: see the class.
            first: the first element in the share, counted from the bucket's first.
            last: the one after the last.
            details: those of the gradient, see `mirrorc.ir.gradient_forms.GradientForm`.
        """

    @abstractmethod
    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        """Writes the sum over all replicas.

        Args:
            factors: the gradient's factors on each replica that has examples, in order, those of one part after the other.
            total: the piece's elements, 1-D; they hold what the last step left there.
        """

    def make(self, buckets: Sequence[FactoredBucket], total: torch.Tensor) -> None:
        self.add_up(self.factors_in(buckets), total)

    def factors_in(self, buckets: Sequence[FactoredBucket]) -> list[Factors]:
        """The gradient's factors, as `add_up` takes them."""
        return [part for bucket in buckets if bucket.factors for part in bucket.factors[self.factored]]


def visit_parts(total: torch.Tensor, visit: Visit) -> None:
    """Visits the parts of what is made already, 1-D, in order; none if it is empty."""
    for start in range(0, total.numel(), CACHED_ELEMENTS):
        visit(total[start : start + CACHED_ELEMENTS])


Defer = Callable[[FactoredPiece, Sequence[Factors], torch.Tensor], None]
"""Takes a piece, its factors, and its elements, 1-D; they are as for `FactoredPiece.add_up`, which the taker is to call."""

makes_shares_of: Handlers[type[FactoredPiece]] = Handlers("make shares of the gradients of")
"""The subclass of `FactoredPiece` for the operation of each form of gradient; used as a decorator, it registers a class."""
