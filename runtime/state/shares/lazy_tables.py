"""Gradients of embeddings' tables whose rows are not added yet: what they measure follows from the rows."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mirrorc.runtime.state.shares.pieces import FactoredBucket, Factors, Piece, Visit
from mirrorc.runtime.state.shares.table_pieces import OwnRows, TablePiece
from mirrorc.torch_internals import subtract_each


@dataclass
class UnmadeTable:
    """A piece of a table's gradient that is not made.

    Attributes:
        piece: it has few rows in a step, of many.
        factors: see `TablePiece.add_up`.
        own: the rows that are added to it, once they are known; those that are added to one row may be summed.
    """

    piece: TablePiece
    factors: Sequence[Factors]
    own: OwnRows | None = None

    def make(self, whole: torch.Tensor, factor: float = 1.0) -> None:
        """Makes it in the bucket, times a finite factor."""
        if self.own is None:
            rows_of_tables([self])
        assert self.own is not None, "it was given"
        self.piece.add_rows([self.own], whole[self.piece.start : self.piece.stop], factor)

    def make_visited(self, whole: torch.Tensor, visit: Visit) -> None:
        """Makes it in the bucket, and visits it."""
        self.make(whole)
        self.piece.visit_made(whole[self.piece.start : self.piece.stop], visit)


def unmade_table(piece: TablePiece, buckets: Sequence[FactoredBucket]) -> UnmadeTable:
    """Leaves a piece unmade; ``buckets`` as `Piece.make` takes them."""
    return UnmadeTable(piece, piece.factors_in(buckets))


def bytes_of_tables(pieces: Iterable[Piece], factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
    """The bytes of the rows that are kept for a share's tables until they are made, if the shares get equal parts of them.
    Arguments as for `bytes_to_measure_tables`."""
    return bytes_to_measure_tables(pieces, factors) // len(factors)


def bytes_to_measure_tables(pieces: Iterable[Piece], factors: Sequence[Sequence[Sequence[Factors]]]) -> int:
    """The bytes of the rows of all shares, which lie side by side only while the share's are found and measured.

    Args:
        pieces: of the share.
        factors: as `Piece.temporary_bytes`.
    """
    total = 0
    for piece in pieces:
        if isinstance(piece, TablePiece):
            own = [part for replica in factors for part in replica[piece.factored]]
            if piece.is_left(own, own[0][0].dtype):
                total += sum(rows.numel() * rows.itemsize for rows, _ in own)
    return total


def rows_of_tables(tables: Iterable[UnmadeTable]) -> list[torch.Tensor]:
    """All rows that are added to tables, those of one width together, 2-D; each table gets its own."""
    found = []
    for group in _by_width(tables):
        places, rows = _selected(group)
        _give(group, places, rows)
        found.append(rows)
    return found


def norm_of_tables(tables: Iterable[UnmadeTable]) -> float | None:
    """The 2-norm of all tables together; None if an element may not be finite. Each table gets the sums of its rows."""
    norms = []
    for group in _by_width(tables):
        places, rows = _selected(group)
        found, numbers = places.unique(return_inverse=True)
        sums = rows.new_zeros(len(found), rows.shape[1]).index_add_(0, numbers, rows)
        _give(group, found, sums)
        norms.append(torch.linalg.vector_norm(sums, dtype=torch.float64))
    norm = math.hypot(*(one.item() for one in norms))
    return norm if math.isfinite(norm) else None


def _by_width(tables: Iterable[UnmadeTable]) -> list[list[UnmadeTable]]:
    """Groups of tables whose rows are handled together: in two threads that take turns with the interpreter, calls of small
    operators take longer than what they do."""
    groups: dict[tuple[int, torch.dtype], list[UnmadeTable]] = defaultdict(list)
    for table in tables:
        rows, _ = table.factors[0]
        groups[rows.shape[-1], rows.dtype].append(table)
    return list(groups.values())


def _selected(tables: Sequence[UnmadeTable]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that are added to pieces of one width, one piece after the other, and to which rows of all pieces."""
    parts = [
        (number, *table.piece.rows_and_places(part)) for number, table in enumerate(tables) for part in table.factors
    ]
    places = torch.cat([places for _, _, places in parts])
    lengths = torch.tensor([len(places) for _, _, places in parts])
    columns = _numbers(tables)[:, [number for number, _, _ in parts]]
    first, stop, left_out, offset = columns.repeat_interleave(lengths, dim=1, output_size=len(places))
    own = (places >= first) & (places < stop)
    if any(table.piece.padding_idx >= 0 for table in tables):
        own &= places != left_out
    selected = own.nonzero().squeeze(1)
    rows = torch.cat([rows for _, rows, _ in parts])
    return (places + offset).index_select(0, selected), rows.index_select(0, selected)


def _give(tables: Sequence[UnmadeTable], places: torch.Tensor, rows: torch.Tensor) -> None:
    """Gives each table its rows; ``places`` are those of all pieces, one piece after the other."""
    ends = list(itertools.accumulate(table.piece.num_rows_here for table in tables))
    counts = torch.searchsorted(places, torch.tensor(ends)).tolist()  # all of a piece are smaller than the next one's
    sizes = [count - before for before, count in itertools.pairwise([0, *counts])]
    starts = [0, *ends[:-1]]
    own = zip(subtract_each(places.split(sizes), starts), rows.split(sizes), strict=True)
    for table, (its_places, its_rows) in zip(tables, own, strict=True):
        table.own = its_places, its_rows


def _numbers(tables: Sequence[UnmadeTable]) -> torch.Tensor:
    """For each table's piece, a column: its first row, the one after its last, the row that is left out, and what makes numbers
    of its rows those of all pieces' rows, one piece after the other."""
    columns, end = [], 0
    for piece in (table.piece for table in tables):
        first, stop = piece.rows.start, piece.rows.stop
        columns.append((first, stop, piece.padding_idx, end - first))
        end += stop - first
    return torch.tensor(columns).t()
