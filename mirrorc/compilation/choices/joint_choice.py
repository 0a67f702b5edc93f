"""The base class of joint choices of a step's workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class JointChoice(ABC):
    """A joint choice of all workers, made in the first training call.

    Each worker makes a proposal from its captured programs, and decides by the proposals of all. Before the first call its
    own proposal decides, to compile early. It compiles again if the joint decision differs.

    Args:
        team: None for planned workers, where the first proposal counts.
    """

    subject: ClassVar[str]
    """The name of the proposals in messages between workers."""

    def __init__(self, options: StepOptions, team: Team | None) -> None:
        self._options, self._team = options, team
        self._sent: str | None = None  # a repeated proposal must be the same
        self._is_joint = False  # the decision follows from the proposals of all workers
        self._is_final = False

    @abstractmethod
    def concerns(self, program: Program) -> bool:
        """Tests for a program with something to choose."""

    @abstractmethod
    def observe(self, program: Program) -> None:
        """Notes facts of a captured program for the proposal."""

    @abstractmethod
    def propose(self) -> str:
        """The text of this worker's proposal."""

    @abstractmethod
    def decide(self, proposals: Sequence[str]) -> None:
        """Decides by the proposals of all workers, in the order of ranks.

        Raises:
            CommunicationError: the proposals conflict; on all workers.
        """

    @abstractmethod
    def applies_to(self, program: Program) -> bool:
        """Tests for a program compiled by the present decision."""

    @abstractmethod
    def noted_in(self, program: Program) -> Program:
        """The captured program with the present decision."""

    def consider(self, program: Program, *, in_call: bool) -> None:
        """Observes a captured program and decides, with all workers in a training call, else alone."""
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
        """Exchanges proposals and decides, once; blocks until all workers come."""
        if self._is_final or self._team is None:
            return
        self._sent = self.propose() if self._sent is None else self._sent
        proposals = self._team.control.first_texts(self.subject, self._sent)
        with self._team.control.raising_alike():
            self.decide(proposals)
        self._is_joint = self._is_final = True
