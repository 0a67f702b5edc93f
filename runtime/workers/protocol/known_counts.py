"""The numbers of rows of the factors that workers send, which they tell each other once for each kind of batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mirrorc.runtime.workers.protocol.header import Header, digest

Counts = tuple[int, ...]
Tell = Callable[[Callable[[Any], Any]], None]


class KnownCounts:
    """Those that workers have told, by their digests.

    A header has the digest of a worker's own counts, and one of all that it knows. Where one of the former is new to any worker,
    or the latter differ, as after a call that one of them did not end, all tell theirs, in one more message.
    """

    def __init__(self) -> None:
        self._by_digest: dict[int, Counts] = {}

    def noted_in(self, header: Header, counts: Counts) -> Header:
        """A header with what this worker says of its counts."""
        return replace(
            header,
            num_counts=len(counts),
            counts=digest(repr(counts)),
            known=digest(repr(sorted(self._by_digest))),
        )

    def of_all(self, headers: Sequence[torch.Tensor], own: Counts, tell: Tell) -> list[Counts]:
        """The counts of each worker, by rank.

        Args:
            headers: of all workers by rank, [fields] int64.
            own: this worker's.
            tell: runs a collective of all workers.
        """
        said = [Header(*map(int, header)) for header in headers]
        length = max(one.num_counts for one in said)
        if not length:
            return [() for _ in said]
        if len({one.known for one in said}) > 1 or not all(one.counts in self._by_digest for one in said):
            padded = torch.zeros(length, dtype=torch.int64)
            padded[: len(own)] = torch.tensor(own, dtype=torch.int64)
            told = [torch.empty_like(padded) for _ in said]
            tell(lambda group: group.all_gather(padded, told))
            if len({one.known for one in said}) > 1:
                self._by_digest = {}  # they begin anew together
            for one, numbers in zip(said, told, strict=True):
                self._by_digest[one.counts] = tuple(map(int, numbers[: one.num_counts]))
        return [self._by_digest[one.counts] for one in said]
