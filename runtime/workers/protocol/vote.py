"""What a worker tells the others at the end of a step, before it commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mirrorc.errors import CommunicationError
from mirrorc.ir.program import Program


@dataclass(frozen=True)
class Vote:
    """What a worker tells the others of a step, when it has done all of it that can fail.

    Attributes:
        takes_place: whether the step takes place, as far as this worker knows.
        has_sound_sums: whether all that it has found in sums over all workers is finite, which must be the same on all of them.
        numbers: those that its replicas have left, [numbers of each, replicas]; None for none.
        used: which parameters its replicas have used, [parameters] float64, ones and zeros; None if each step uses the same.
    """

    takes_place: bool
    has_sound_sums: bool = True
    numbers: torch.Tensor | None = None
    used: torch.Tensor | None = None

    def to_message(self, columns: Columns) -> torch.Tensor:
        """What is added up over all workers, 1-D float64: two counts of votes, all numbers, and who has used each parameter.

        Args:
            columns: of the replicas with whose numbers all go on; each leaves as many as one of this worker.
        """
        said = [torch.tensor([self.takes_place, self.has_sound_sums], dtype=torch.float64)]
        if self.numbers is not None:
            said.append(columns.filled(self.numbers).reshape(-1))
        if self.used is not None:
            said.append(self.used)
        return torch.cat(said)


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


@dataclass(frozen=True)
class Outcome:
    """What all workers have voted for.

    Attributes:
        takes_place: whether the step takes place, as all say.
        numbers: those that all go on with, [numbers of each, columns] float64; None for none.
        used: how many workers have used each parameter, [parameters] float64; None if each step uses the same.
    """

    takes_place: bool
    numbers: torch.Tensor | None = None
    used: torch.Tensor | None = None


def outcome(message: torch.Tensor, columns: Columns, num_workers: int, num_parameters: int = 0) -> Outcome:
    """What all workers have voted for.

    Args:
        message: the sum of what each has made with `Vote.to_message`.
        columns: of the replicas with whose numbers all go on.
        num_workers: how many have voted.
        num_parameters: of how many parameters each has said whether it has used them.

    Raises:
        CommunicationError: the workers have found something else in the same sums.
    """
    num_yes, num_sound = message[:2].tolist()
    if num_sound not in (0.0, num_workers):
        raise CommunicationError("some workers skip the step, and others make it: what they have summed up differs")
    numbers, used = message[2 : len(message) - num_parameters], message[len(message) - num_parameters :]
    return Outcome(
        num_yes == num_workers,
        numbers.view(-1, columns.num) if len(numbers) else None,
        used if num_parameters else None,
    )
