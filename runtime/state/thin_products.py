"""Products of thin factors: made in blocks, each element with the same bits on every processor, or taken away from a matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK_ELEMENTS = 2**16  # of a product that is made at once, in a processor's cache


def products(left: torch.Tensor, right: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The elements of ``left @ right.T`` from ``start`` to ``stop``, as it lies row by row: blocks, each with its place.

    Each element is made alike, wherever it is cut and on every processor: products are rounded, and added in one order.

    Args:
        left, right: [rows, rank] and [columns, rank].
        start, stop: of the elements.
    """
    columns, rank = right.shape
    right = right.T.contiguous()
    height = _block_height(columns)
    made, product = (left.new_empty(height, columns) for _ in range(2))
    for first in range(start // columns, -(-stop // columns), height):
        last = min(first + height, -(-stop // columns))
        own, factor, block = made[: last - first], product[: last - first], left[first:last]
        torch.mul(block[:, :1], right[0], out=own)
        for k in range(1, rank):
            own.add_(torch.mul(block[:, k : k + 1], right[k], out=factor))
        begin, end = max(start, first * columns), min(stop, last * columns)
        yield begin, own.view(-1)[begin - first * columns : end - first * columns]


def subtract_product(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, start: int, stop: int) -> None:
    """Subtracts ``left @ right.T`` from the elements of a matrix from ``start`` to ``stop``, as it lies row by row, in place.

    Its bits depend on the processor and on where it is cut, so it is for what one worker has alone; it takes a fifth of the time
    of `products`.

    Args:
        matrix: [rows, columns].
        left, right: [rows, rank] and [columns, rank].
        start, stop: of the elements.
    """
    columns = right.shape[0]
    first, last = -(-start // columns), stop // columns  # of the rows that lie in them whole
    parts = (
        [(start, min(stop, first * columns)), (max(start, last * columns), stop)] if first <= last else [(start, stop)]
    )
    matrix[first:last].addmm_(left[first:last], right.T, alpha=-1)
    for begin, end in parts:
        if begin < end:
            row = begin // columns
            own = slice(begin - row * columns, end - row * columns)
            matrix[row, own].addmv_(right[own], left[row], alpha=-1)


def elements_of_blocks(rows: int, columns: int) -> int:
    """How many elements `products` has in memory at once of a product of this size."""
    return 2 * min(rows, _block_height(columns)) * columns


def _block_height(columns: int) -> int:
    return max(1, _BLOCK_ELEMENTS // columns)
