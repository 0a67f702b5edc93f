"""The choices that workers make together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mirrorc.compilation.choices.gradient_order import ChiefGradientOrder
from mirrorc.compilation.choices.worker_exchange import ExchangeChoice
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class WorkerChoices:
    """The joint choices, in the order of their exchange."""

    def __init__(self, options: StepOptions, num_threads: int, team: Team | None) -> None:
        self.exchange = ExchangeChoice(options, num_threads, team)
        self._choices = (ChiefGradientOrder(options, team), self.exchange)
        self._has_team, self._in_call = team is not None, False

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Marks a training call, in which workers can exchange proposals."""
        self._in_call = self._has_team
        try:
            yield
        finally:
            self._in_call = False

    def are_open_for(self, program: Program) -> bool:
        return any(choice.concerns(program) and not choice.is_final for choice in self._choices)

    def settle(self, program: Program) -> None:
        for choice in self._choices if self._in_call else ():
            if choice.concerns(program):
                choice.settle()

    def apply_to(self, program: Program) -> bool:
        """False for a program compiled before the first call, if decisions have changed since."""
        return all(choice.applies_to(program) for choice in self._choices)

    def put_into(self, program: Program) -> Program:
        """The program with all decisions. Open choices are made now."""
        for choice in self._choices:
            choice.consider(program, in_call=self._in_call)
            program = choice.noted_in(program)
        return program
