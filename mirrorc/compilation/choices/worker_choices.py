"""The choices that the workers of a step make together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mirrorc.compilation.choices.gradient_order import ReadyOrder
from mirrorc.compilation.choices.worker_exchange import ExchangeChoice
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class WorkerChoices:
    """All joint choices of a step, in the order in which workers exchange proposals.

    Args:
        options: of the step.
        num_threads: of each device.
        team: the workers that train together; None for a process on its own, and for a world that is not there.

    Attributes:
        exchange: the exchange of gradients.
    """

    def __init__(self, options: StepOptions, num_threads: int, team: Team | None) -> None:
        self.exchange = ExchangeChoice(options, num_threads, team)
        self._choices = (ReadyOrder(options, team), self.exchange)
        self._has_team, self._in_call = team is not None, False

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """A block that is a training call, in which workers can exchange proposals; of a process alone, nothing is open."""
        self._in_call = self._has_team
        try:
            yield
        finally:
            self._in_call = False

    def settle(self, program: Program) -> None:
        """In a training call of all workers, makes the choices that concern a program and are still open; blocks until all come.

        Raises:
            CommunicationError: the proposals do not go together; on all workers.
        """
        for choice in self._choices if self._in_call else ():
            if choice.concerns(program):
                choice.settle()

    def apply_to(self, program: Program) -> bool:
        """Whether a program has been compiled by the present decisions; it may have been compiled before the first call."""
        return all(choice.applies_to(program) for choice in self._choices)

    def put_into(self, program: Program) -> Program:
        """A captured program with all decisions, which are made now if they are open.

        Raises:
            CommunicationError: as `settle`.
        """
        for choice in self._choices:
            choice.consider(program, in_call=self._in_call)
            program = choice.noted_in(program)
        return program
