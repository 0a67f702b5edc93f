"""The base class of choices that all workers make together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class JointChoice(ABC):
    """A choice that workers make in the first training call. Before it, a worker decides alone, so that it can compile
    early.

    ``team`` is None for planned workers.
    """

    subject: ClassVar[str]
    """The name of proposals in messages between workers."""

    def __init__(self, options: StepOptions, team: Team | None) -> None:
        self._options, self._team = options, team
        self._sent: str | None = None  # a repeated proposal must be the same
        self._is_joint = False  # the decision follows from the proposals of all workers
        self.is_final = False

    @abstractmethod
    def concerns(self, program: Program) -> bool:
        """True if a program has something to choose."""

    @abstractmethod
    def observe(self, program: Program) -> None:
        pass

    @abstractmethod
    def propose(self) -> str:
        pass

    @abstractmethod
    def decide(self, proposals: Sequence[str]) -> None:
        """Decides from the proposals by rank. If they conflict, all workers raise CommunicationError."""

    @abstractmethod
    def applies_to(self, program: Program) -> bool:
        """True if a program was compiled under the current decision."""

    @abstractmethod
    def noted_in(self, program: Program) -> Program:
        pass

    def consider(self, program: Program, *, in_call: bool) -> None:
        """Observes a program and decides: with all workers within a training call, else alone."""
        if self.is_final or not self.concerns(program):
            return
        if self._sent is None:
            self.observe(program)
        if in_call and self._team is not None:
            self.settle()
        else:
            self.decide([self.propose()] * self._options.program_workers.num_workers)
            self.is_final = self._team is None

    def settle(self) -> None:
        """Exchanges proposals and decides, once. Blocks until all workers come."""
        if self.is_final or self._team is None:
            return
        self._sent = self.propose() if self._sent is None else self._sent
        proposals = self._team.control.first_texts(self.subject, self._sent)
        with self._team.control.raising_alike():
            self.decide(proposals)
        self._is_joint = self.is_final = True
