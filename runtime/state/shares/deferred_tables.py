"""Deferred gradients of embedding tables: rows are scattered after the commit, right before the update."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mirrorc.runtime.state.shares.pieces import AllFactors, FactoredPiece, Factors, Piece, Visit
from mirrorc.runtime.state.shares.product_pieces import OwnRows, TablePiece
from mirrorc.torch_internals import norms_of_each, subtract_each

_MARGIN = 16.0  # between a bound and the largest number, for rounding errors


@dataclass
class DeferredTable:
    piece: TablePiece
    factors: Sequence[Factors]
    total: torch.Tensor
    rows: OwnRows | None = None

    def make(self) -> None:
        if self.rows is None:
            self.piece.add_up(self.factors, self.total)
        else:
            self.piece.add_rows([self.rows], self.total)


class DeferredTables:
    """The tables that a wait defers. Checks before the commit need only their rows."""

    def __init__(self, visit: Visit) -> None:
        self.visit = replace(visit, defer=self._defer)
        self._tables: list[DeferredTable] = []
        self._are_finite = False  # known for all tables

    def _defer(self, piece: FactoredPiece, factors: Sequence[Factors], total: torch.Tensor) -> None:
        assert isinstance(piece, TablePiece), "no other piece is deferred"
        self._tables.append(DeferredTable(piece, factors, total))

    def forget(self) -> None:
        self._tables, self._are_finite = [], False

    def make(self) -> None:
        for table in self._tables:
            table.make()
        self._tables = []

    def make_visited(self) -> None:
        for table in self._tables:
            table.make()
            table.piece.visit_made(table.total, self.visit)
        self._tables = []

    @staticmethod
    def measure(shares: Sequence[DeferredTables]) -> float | None:
        """The norm of the tables. None without tables; if it is not finite, the tables are made and visited."""
        tables = [table for share in shares for table in share._tables]
        norm = norm_of_tables(tables) if tables else None
        for share in shares:
            if norm is None:
                share.make_visited()
            share._are_finite = True
        return norm

    @staticmethod
    def settle(shares: Iterable[DeferredTables]) -> None:
        unknown = [share for share in shares if share._tables and not share._are_finite]
        if unknown and not are_finite([table for share in unknown for table in share._tables]):
            for share in unknown:
                share.make_visited()


def bytes_of_tables(pieces: Iterable[Piece], factors: AllFactors) -> int:
    return bytes_to_measure_tables(pieces, factors) // len(factors)


def bytes_to_measure_tables(pieces: Iterable[Piece], factors: AllFactors) -> int:
    """Bytes of the rows of all shares, which are adjacent during selection and measurement."""
    total = 0
    for piece in pieces:
        if isinstance(piece, TablePiece):
            parts = [part for replica in factors for part in replica[piece.factored]]
            if piece.has_few_rows(parts):
                total += sum(rows.numel() * rows.itemsize for rows, _ in parts)
    return total


def select_rows(tables: Iterable[DeferredTable]) -> list[torch.Tensor]:
    selected = []
    for group in _by_width(tables):
        places, rows = _selected(group)
        _assign(group, places, rows)
        selected.append(rows)
    return selected


def are_finite(tables: Iterable[DeferredTable]) -> bool:
    """Tests a bound: no sum of rows exceeds the rows' norm times the square root of their number."""
    rows = select_rows(tables)
    norms = torch.stack(norms_of_each(rows)).tolist()
    return all(
        norm * math.sqrt(len(added)) < torch.finfo(added.dtype).max / _MARGIN
        for norm, added in zip(norms, rows, strict=True)
    )


def norm_of_tables(tables: Iterable[DeferredTable]) -> float | None:
    """The norm of the tables; None if elements may not be finite. Each table gets its summed rows."""
    norms = []
    for group in _by_width(tables):
        places, rows = _selected(group)
        distinct, numbers = places.unique(return_inverse=True)
        sums = rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, numbers, rows)
        _assign(group, distinct, sums)
        norms.append(torch.linalg.vector_norm(sums, dtype=torch.float64))
    norm = math.hypot(*(norm_of_width.item() for norm_of_width in norms))
    return norm if math.isfinite(norm) else None


def _by_width(tables: Iterable[DeferredTable]) -> list[list[DeferredTable]]:
    """Groups tables by row width and dtype, for fewer calls: many small operators cost threads time in the interpreter."""
    groups: dict[tuple[int, torch.dtype], list[DeferredTable]] = defaultdict(list)
    for table in tables:
        rows, _ = table.factors[0]
        groups[rows.shape[-1], rows.dtype].append(table)
    return list(groups.values())


def _selected(tables: Sequence[DeferredTable]) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [(i, *table.piece.rows_and_places(part)) for i, table in enumerate(tables) for part in table.factors]
    places = torch.cat([places for _, _, places in parts])
    lengths = torch.tensor([len(places) for _, _, places in parts])
    columns = _numbers(tables)[:, [number for number, _, _ in parts]]
    first, stop, left_out, offset = columns.repeat_interleave(lengths, dim=1, output_size=len(places))
    is_inside = (places >= first) & (places < stop)
    if any(table.piece.padding_idx >= 0 for table in tables):
        is_inside &= places != left_out
    selected = is_inside.nonzero().squeeze(1)
    rows = torch.cat([rows for _, rows, _ in parts])
    return (places + offset).index_select(0, selected), rows.index_select(0, selected)


def _assign(tables: Sequence[DeferredTable], places: torch.Tensor, rows: torch.Tensor) -> None:
    ends = list(itertools.accumulate(table.piece.num_rows_here for table in tables))
    counts = torch.searchsorted(places, torch.tensor(ends)).tolist()  # all of a piece are smaller than the next one's
    sizes = [count - before for before, count in itertools.pairwise([0, *counts])]
    starts = [0, *ends[:-1]]
    for table, *assigned in zip(tables, subtract_each(places.split(sizes), starts), rows.split(sizes), strict=True):
        table.rows = assigned[0], assigned[1]


def _numbers(tables: Sequence[DeferredTable]) -> torch.Tensor:
    """Columns: first row, end row, padding row, and offset to row numbers among all pieces."""
    columns, end = [], 0
    for piece in (table.piece for table in tables):
        first, stop = piece.rows.start, piece.rows.stop
        columns.append((first, stop, piece.padding_idx, end - first))
        end += stop - first
    return torch.tensor(columns).t()
