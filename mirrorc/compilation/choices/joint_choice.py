"""The base of choices that all workers of a step make alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class JointChoice(ABC):
    """A choice that all workers of a step make alike, in the first training call, and keep from then on.

    A worker compiles for its own batches alone. So each makes a proposal from the programs that it has captured, all exchange
    their proposals in a training call, and each decides by all of them. Until then a worker decides by its own proposal, so that
    a program can be compiled before the first call; it is compiled anew if the workers decide otherwise.

    Args:
        options: of the step.
        team: the workers that train together; None for those of a world that is not there, where the first proposal counts.
    """

    subject: ClassVar[str]
    """The name of the proposals in what workers tell each other."""

    def __init__(self, options: StepOptions, team: Team | None) -> None:
        self._options, self._team = options, team
        self._sent: str | None = None  # a proposal that is sent again must be the same
        self._is_joint = False  # whether the decision follows from the proposals of all workers
        self._is_final = False

    @abstractmethod
    def concerns(self, program: Program) -> bool:
        """Whether anything is chosen for a program."""

    @abstractmethod
    def observe(self, program: Program) -> None:
        """Notes from a captured program what this worker can propose."""

    @abstractmethod
    def propose(self) -> str:
        """The text of this worker's proposal."""

    @abstractmethod
    def decide(self, proposals: Sequence[str]) -> None:
        """Decides by the proposals of all workers, in the order of ranks.

        Raises:
            CommunicationError: the proposals do not go together; on all workers.
        """

    @abstractmethod
    def applies_to(self, program: Program) -> bool:
        """Whether a program has been compiled by the present decision."""

    @abstractmethod
    def noted_in(self, program: Program) -> Program:
        """A captured program with the present decision."""

    def consider(self, program: Program, *, in_call: bool) -> None:
        """Observes a captured program and decides: together with all workers in a training call, else alone.

        Raises:
            CommunicationError: as `decide`.
        """
        if self._is_final or not self.concerns(program):
            return
        if self._sent is None:
            self.observe(program)
        if in_call and self._team is not None:
            self.settle()
        else:
            self.decide([self.propose()] * self._options.program_workers.num_workers)
            self._is_final = self._team is None

    def settle(self) -> None:
        """Exchanges proposals with all workers and decides, once. It blocks until all come, so all must be in a training call.

        Raises:
            CommunicationError: as `decide`.
        """
        if self._is_final or self._team is None:
            return
        self._sent = self.propose() if self._sent is None else self._sent
        proposals = self._team.words.kept_texts(self.subject, self._sent)
        with self._team.words.raising_alike():
            self.decide(proposals)
        self._is_joint = self._is_final = True
