"""Messages with the factors of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mirrorc.ir.buckets import RowType, SentFactors
from mirrorc.ir.gradient_forms import form_named
from mirrorc.runtime.state.shares.pieces import Factors

_ALIGNMENT = (
    64  # bytes: a factor begins at the same place in a cache line on all workers, so that products have equal bits
)

NumRows = Sequence[Sequence[Sequence[int]]]
"""Numbers of rows in one worker, by gradient, replica and microbatch."""
ReplicaFactors = list[list[Factors]]
"""A replica's factors, by gradient and microbatch; empty without examples."""


@dataclass(frozen=True)
class FactorMessage:
    """The rows of all factors of a worker's replicas, concatenated."""

    gradients: Sequence[SentFactors]

    def num_bytes(self, num_rows: NumRows) -> int:
        return sum(_aligned(number * kind.num_bytes) for _, _, number, kind in self._pieces(num_rows))

    def views(self, message: torch.Tensor, num_rows: NumRows) -> list[list[list[list[torch.Tensor]]]]:
        """Views of the rows in a message, [bytes] uint8: by replica, gradient, microbatch and factor."""
        num_replicas = len(num_rows[0])
        views: list[list[list[list[torch.Tensor]]]] = [
            [[[] for _ in worker_rows[replica]] for worker_rows in num_rows] for replica in range(num_replicas)
        ]
        start = 0
        for (place, replica, part), factor, number, kind in self._pieces(num_rows):
            stop = start + number * kind.num_bytes
            rows = message[start:stop].view(kind.dtype).view(number, *kind.shape)
            views[replica][place][part].append(rows)
            assert len(views[replica][place][part]) == factor + 1, "factors come in their order"
            start += _aligned(stop - start)
        return views

    def _pieces(self, num_rows: NumRows) -> Iterator[tuple[tuple[int, int, int], int, int, RowType]]:
        for replica in range(len(num_rows[0])):
            for place, gradient in enumerate(self.gradients):
                for part, number in enumerate(num_rows[place][replica]):
                    for factor, kind in enumerate(gradient.rows):
                        yield (place, replica, part), factor, number, kind

    def write(self, message: torch.Tensor, num_rows: NumRows, replicas: Sequence[ReplicaFactors]) -> None:
        for shard, places in zip(replicas, self.views(message, num_rows), strict=True):
            for gradient, parts, into in zip(self.gradients, shard, places, strict=True) if shard else ():
                for factors, rows in zip(parts, into, strict=True):
                    matrices = form_named(gradient.operation).to_rows(factors)
                    assert matrices is not None, "the form is sent"
                    for to, source in zip(rows, matrices, strict=True):
                        to.copy_(source)

    def read(self, message: torch.Tensor, num_rows: NumRows) -> list[ReplicaFactors]:
        return [
            [
                [form_named(gradient.operation).from_rows(rows) for rows in parts]
                for gradient, parts in zip(self.gradients, replica_views, strict=True)
            ]
            if any(replica_views)
            else []
            for replica_views in self.views(message, num_rows)
        ]


class Gathering:
    """An all-gather of factor messages. ``num_rows`` is by rank."""

    def __init__(
        self, message: FactorMessage, num_rows: Sequence[NumRows], rank: int, replicas: Sequence[ReplicaFactors]
    ) -> None:
        self._layout, self._num_rows = message, num_rows
        length = max(map(message.num_bytes, num_rows))
        self.gathered = torch.empty(len(num_rows), length, dtype=torch.uint8)
        self.message = torch.empty(length, dtype=torch.uint8)
        message.write(self.message, num_rows[rank], replicas)

    @functools.cached_property
    def replicas(self) -> list[ReplicaFactors]:
        """Factors of all workers' replicas, by rank, once the all-gather is done."""
        each = zip(self.gathered.unbind(), self._num_rows, strict=True)
        return [replica for message, num_rows in each for replica in self._layout.read(message, num_rows)]


RowsOf = Callable[[int], Sequence[NumRows]]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
