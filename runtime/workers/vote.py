"""What a worker tells the others at the end of a step, before it commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mirrorc.ir.program import Program


@dataclass(frozen=True)
class Vote:
    """What a worker tells the others of a step, when it has done all of it that can fail.

    Attributes:
        takes_place: whether the step takes place, as far as this worker knows.
        has_sound_sums: whether all that it has found in sums over all workers is finite, which must be the same on all of them.
        numbers: those that its replicas have left, [numbers of each, replicas]; None for none.
    """

    takes_place: bool
    has_sound_sums: bool = True
    numbers: torch.Tensor | None = None


@dataclass(frozen=True)
class Columns:
    """Whose numbers all workers go on with when they have voted: a column for each of some replicas.

    Attributes:
        num: how many replicas these are.
        first: where the columns of this worker's replicas begin; None if it has none of them.
    """

    num: int
    first: int | None

    @classmethod
    def of(cls, program: Program) -> Columns:
        """Those of a program: of all workers' replicas where each worker has a part of the sums; else of the chief's."""
        workers = program.workers
        if program.deals_out:
            return cls(workers.num_all_replicas, workers.first_replica)
        return cls(workers.devices_per_worker[0], None if workers.rank else 0)

    def filled(self, numbers: torch.Tensor) -> torch.Tensor:
        """What this worker adds to the numbers, [numbers of each, columns] float64: its own, and zeros in other columns."""
        columns = torch.zeros(len(numbers), self.num, dtype=torch.float64)
        if self.first is not None:
            columns[:, self.first : self.first + numbers.shape[1]] = numbers
        return columns
