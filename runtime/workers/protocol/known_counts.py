"""Row counts of the workers' factors, exchanged once for each kind of batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mirrorc.cluster.consistency import digest
from mirrorc.runtime.workers.protocol.header import Header

Counts = tuple[int, ...]
_MOST_COUNTS = 4096  # kinds of batches
RunControl = Callable[[Callable[[Any], Any]], None]


class KnownCounts:
    """Row counts of all workers, cached by digest.

    If a worker does not have a digest, or caches differ after an unfinished call, all workers send their counts.
    """

    def __init__(self) -> None:
        self._by_digest: dict[int, Counts] = {}

    def noted_in(self, header: Header, counts: Counts) -> Header:
        return replace(
            header,
            num_counts=len(counts),
            counts=digest(repr(counts)),
            known=digest(repr(sorted(self._by_digest))),
        )

    def of_all(self, headers: Sequence[torch.Tensor], counts: Counts, run_control: RunControl) -> list[Counts]:
        """Row counts of all workers, by rank. ``run_control`` runs a collective of all workers."""
        decoded = [Header(*map(int, header)) for header in headers]
        length = max(peer.num_counts for peer in decoded)
        if not length:
            return [() for _ in decoded]
        if len({peer.known for peer in decoded}) > 1 or not all(peer.counts in self._by_digest for peer in decoded):
            padded = torch.zeros(length, dtype=torch.int64)
            padded[: len(counts)] = torch.tensor(counts, dtype=torch.int64)
            gathered = [torch.empty_like(padded) for _ in decoded]
            run_control(lambda group: group.all_gather(padded, gathered))
            if len({peer.known for peer in decoded}) > 1 or len(self._by_digest) > _MOST_COUNTS:
                self._by_digest = {}  # all workers clear their caches
            for peer, numbers in zip(decoded, gathered, strict=True):
                self._by_digest[peer.counts] = tuple(map(int, numbers[: peer.num_counts]))
        return [self._by_digest[peer.counts] for peer in decoded]
