"""Gradients of a pack as matrices, as which `exchange_low_rank` sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirrorc.ir.buckets import Bucket, Pack, Slot


@dataclass(frozen=True)
class Matrix:
    """A gradient that lies in a pack whole, row by row.

    Attributes:
        variable: whose gradient it is.
        start: its first element, counted from the start of the pack.
        rows, columns: its size.
    """

    variable: str
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """One past its last element, counted from the start of the pack."""
        return self.start + self.rows * self.columns

    @property
    def sides(self) -> int:
        """The elements of both of its factors, of one column each."""
        return self.rows + self.columns


def matrices_in(bucket: Bucket, pack: Pack) -> list[Matrix]:
    """All gradients of a pack that are matrices and lie in it whole, in order.

    The rows are the dimension that is outermost in memory, and all others the columns: of a convolution its output channels,
    and all that each of them reads.
    """
    found = []
    for slot in bucket.slots:
        rows = _rows(slot)
        if rows > 1 and slot.num_elements > rows and pack.start <= slot.offset <= pack.stop - slot.num_elements:
            found.append(Matrix(slot.variable, slot.offset - pack.start, rows, slot.num_elements // rows))
    return found


def _rows(slot: Slot) -> int:
    """The size of the dimension whose steps are the longest; 0 if no dimension divides the slot into equal rows."""
    if not slot.num_elements:
        return 0
    stride, size = max(
        (stride, size) for stride, size in zip(slot.strides or (1,), slot.shape or (1,), strict=True) if size > 0
    )
    return size if stride * size == slot.num_elements else 0


def named_matrices(bucket: Bucket, pack: Pack, names: Sequence[str]) -> list[Matrix]:
    """Those of a pack's matrices that have these names, in the order of the pack; fewer, if the pack has not all of them."""
    return [one for one in matrices_in(bucket, pack) if one.variable in names]
