"""Processes that train together, each with devices of its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mirrorc.messages.problem import message, problem


@dataclass(frozen=True)
class World:
    """The workers to plan for, which need not be running.

    Attributes:
        devices_per_worker: a number for all, or one for each worker.
    """

    num_workers: int
    devices_per_worker: int | Sequence[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", _count("num_workers", self.num_workers))
        numbers: Any = self.devices_per_worker
        if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
            object.__setattr__(self, "devices_per_worker", _count("devices_per_worker", numbers))
            return
        counts = tuple(_count(f"devices_per_worker[{rank}]", number) for rank, number in enumerate(numbers))
        if len(counts) != self.num_workers:
            raise problem(
                ValueError,
                f"MC6104: devices_per_worker has {len(counts)} numbers, but num_workers is {self.num_workers}",
                fix="give one for each worker, or a single number for all",
            )
        object.__setattr__(self, "devices_per_worker", counts)

    def worker(self, rank: int) -> Workers:
        is_whole = hasattr(type(rank), "__index__") and not isinstance(rank, bool)
        if not is_whole or not 0 <= rank < self.num_workers:
            raise (ValueError if is_whole else TypeError)(
                message(
                    f"MC6104: rank is {rank!r:.60}, but the world has {self.num_workers} workers",
                    fix=f"give a number from 0 to {self.num_workers - 1}",
                )
            )
        counts = self.devices_per_worker
        return Workers((counts,) * self.num_workers if isinstance(counts, int) else tuple(counts), rank)


def _count(name: str, number: Any) -> int:
    wanted = "give a positive whole number"
    if isinstance(number, bool) or not hasattr(type(number), "__index__"):
        raise TypeError(f"MC1001: {name} is {number!r:.60}: {wanted}")
    count = operator.index(number)
    if count < 1:
        raise ValueError(f"MC1002: {name} is {count}: {wanted}")
    return count


@dataclass(frozen=True)
class Workers:
    """The workers of a program; worker ``rank`` runs the program. Replicas are numbered over all workers, by rank.

    Attributes:
        devices_per_worker: empty if a process trains on its own.
        sent_as_factors: variables whose gradients workers send as factors.
        shards_optimizer: each worker updates a part of each bucket.
        gradient_order: variables in the order of the chief's backward.
    """

    devices_per_worker: tuple[int, ...] = ()
    rank: int = 0
    sent_as_factors: tuple[str, ...] = ()
    shards_optimizer: bool = False
    gradient_order: tuple[str, ...] = ()

    @property
    def are_several(self) -> bool:
        return len(self.devices_per_worker) > 1

    @property
    def num_workers(self) -> int:
        return max(1, len(self.devices_per_worker))

    @property
    def are_alike(self) -> bool:
        return len(set(self.devices_per_worker)) < 2

    @property
    def first_replica(self) -> int:
        return sum(self.devices_per_worker[: self.rank])

    @property
    def num_all_replicas(self) -> int:
        """The number of replicas on all workers; 0 if a process trains on its own."""
        return sum(self.devices_per_worker)


ALONE = Workers()
