"""Products of thin factors: made in blocks, each element with the same bits on every processor, or by the library."""

from __future__ import annotations

import torch

_BLOCK_ELEMENTS = 2**16  # of a product that is made at once, in a processor's cache


def write_elements(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, start: int) -> None:
    """Writes the elements of ``left @ right.T`` from ``start`` on, as it lies row by row.

    Each element is made alike, wherever it is cut and on every processor: products are rounded, and added in one order.

    Args:
        into: as many elements as are written, 1-D.
        left, right: [rows, rank] and [columns, rank].
        start: of the elements.
    """
    columns = right.shape[0]
    right = right.T.contiguous()
    rows, pieces = _cut(start, start + into.numel(), columns)
    whole, factors = _whole_rows(into, start, rows, columns), left[rows]
    room = left.new_empty(min(_block_height(columns), left.shape[0]), columns)
    for block, factor in zip(whole.split(len(room)), factors.split(len(room)), strict=True):
        _add_up(block, factor, right, room)
    for row, own in pieces:
        first = row * columns - start
        _add_up(into[None, first + own.start : first + own.stop], left[row, None], right[:, own], room)


def _add_up(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, room: torch.Tensor) -> None:
    """Writes ``left @ right`` element by element; there is room for as many elements besides."""
    product = room[: into.shape[0], : into.shape[1]]
    torch.mul(left[:, :1], right[0], out=into)
    for k in range(1, right.shape[0]):
        into.add_(torch.mul(left[:, k : k + 1], right[k], out=product))


def write_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, start: int) -> None:
    """Writes the elements of ``left @ right.T`` from ``start`` on, as it lies row by row, by the library's product.

    Its bits depend on the processor, on the number of threads, and on where it is cut, so it is for workers that have all of that
    alike; it takes a quarter of the time of `write_elements`.

    Args:
        into: as many elements as are written, 1-D.
        left, right: [rows, rank] and [columns, rank].
        start: of the elements.
    """
    columns = right.shape[0]
    rows, pieces = _cut(start, start + into.numel(), columns)
    torch.mm(left[rows], right.T, out=_whole_rows(into, start, rows, columns))
    for row, own in pieces:
        first = row * columns - start
        torch.mv(right[own], left[row], out=into[first + own.start : first + own.stop])


def subtract_product(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, start: int, stop: int) -> None:
    """Subtracts ``left @ right.T`` from the elements of a matrix from ``start`` to ``stop``, as it lies row by row, in place.

    Its bits depend on what those of `write_product` depend on, so it is for what one worker has alone.

    Args:
        matrix: [rows, columns].
        left, right: [rows, rank] and [columns, rank].
        start, stop: of the elements.
    """
    rows, pieces = _cut(start, stop, right.shape[0])
    matrix[rows].addmm_(left[rows], right.T, alpha=-1)
    for row, own in pieces:
        matrix[row, own].addmv_(right[own], left[row], alpha=-1)


def _cut(start: int, stop: int, columns: int) -> tuple[slice, list[tuple[int, slice]]]:
    """The rows of a matrix that lie between two elements whole, and the pieces of rows beside them: the row, and its columns."""
    first, last = -(-start // columns), stop // columns
    if first > last:
        bounds, rows = [(start, stop)], slice(first, first)
    else:
        bounds, rows = [(start, min(stop, first * columns)), (max(start, last * columns), stop)], slice(first, last)
    pieces = [(begin // columns, begin, end) for begin, end in bounds if begin < end]
    return rows, [(row, slice(begin - row * columns, end - row * columns)) for row, begin, end in pieces]


def _whole_rows(into: torch.Tensor, start: int, rows: slice, columns: int) -> torch.Tensor:
    """Where these rows of a matrix lie in memory that begins with its element ``start``."""
    return into[rows.start * columns - start : rows.stop * columns - start].view(-1, columns)


def elements_of_room(rows: int, columns: int) -> int:
    """How many elements `write_elements` has in memory besides a product of this size."""
    return min(rows, _block_height(columns)) * columns


def _block_height(columns: int) -> int:
    return max(1, _BLOCK_ELEMENTS // columns)
