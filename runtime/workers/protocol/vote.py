"""Votes of workers at a step's commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mirrorc.errors import CommunicationError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem


@dataclass(frozen=True)
class Vote:
    """A worker's vote on a step, after everything that can fail.

    Attributes:
        has_sound_sums: all sums over workers are finite; equal on all workers.
        numbers: [numbers of each replica, replicas].
        used: [parameters] float64, 1 for each parameter that this worker's replicas used, else 0; None if all steps use
            the same.
    """

    takes_place: bool
    has_sound_sums: bool = True
    numbers: torch.Tensor | None = None
    used: torch.Tensor | None = None

    def to_message(self, columns: Columns) -> torch.Tensor:
        """This worker's summand, 1-D float64: two flags as 0 or 1, all numbers, and the used parameters."""
        values = [torch.tensor([self.takes_place, self.has_sound_sums], dtype=torch.float64)]
        if self.numbers is not None:
            values.append(columns.filled(self.numbers).reshape(-1))
        if self.used is not None:
            values.append(self.used)
        return torch.cat(values)


@dataclass(frozen=True)
class Columns:
    """The replicas whose numbers all workers adopt after the vote, with a column each.

    Attributes:
        first: first column of this worker's replicas; None without columns.
    """

    num: int
    first: int | None

    @classmethod
    def of(cls, program: Program) -> Columns:
        workers = program.workers
        if program.has_sharded_optimizer:
            return cls(workers.num_all_replicas, workers.first_replica)
        return cls(workers.devices_per_worker[0], None if workers.rank else 0)

    def filled(self, numbers: torch.Tensor) -> torch.Tensor:
        """This worker's columns among all, [numbers of each replica, columns] float64; other columns are zeros."""
        columns = torch.zeros(len(numbers), self.num, dtype=torch.float64)
        if self.first is not None:
            columns[:, self.first : self.first + numbers.shape[1]] = numbers
        return columns


@dataclass(frozen=True)
class Outcome:
    """The result of a vote.

    Attributes:
        numbers: [numbers of each replica, columns] float64.
        used: number of workers that used each parameter, [parameters] float64; None as in `Vote`.
    """

    takes_place: bool
    numbers: torch.Tensor | None = None
    used: torch.Tensor | None = None


def outcome(message: torch.Tensor, columns: Columns, num_workers: int, num_parameters: int = 0) -> Outcome:
    """The result of a vote whose ``message`` is the sum of all workers' `Vote.to_message`.

    Raises:
        CommunicationError: workers find different sums finite.
    """
    num_yes, num_sound = message[:2].tolist()
    if num_sound not in (0.0, num_workers):
        raise problem(
            CommunicationError,
            "MC6301: some workers skip the step, and others make it",
            "the sums that they have received differ",
            "look for memory or network faults, and start all workers again from a checkpoint",
        )
    numbers, used = message[2 : len(message) - num_parameters], message[len(message) - num_parameters :]
    return Outcome(
        num_yes == num_workers,
        numbers.view(-1, columns.num) if len(numbers) else None,
        used if num_parameters else None,
    )
