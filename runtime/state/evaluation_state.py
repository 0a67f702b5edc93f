"""A step's state during evaluation: variables in place, optimizer untouched."""

from __future__ import annotations

from collections.abc import Hashable

from mirrorc.ir.program import Program
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.step_state import StateView


class EvaluationState(StateView):
    """The counterpart of `StepState` for evaluations, which write only buffers."""

    def begin_loss(self, program: Program, examples: Examples) -> float:
        return 1.0

    def prepare_for(self, program: Program, *, is_stale: bool | None = None) -> None:
        self._state.prepare_variables_for(program)

    def needs_other_buckets(self, program: Program, *, is_stale: bool) -> bool:
        return False

    def finish(self) -> None:
        self._state.store.aggregate()

    def skip(self, number: int) -> None:
        raise AssertionError("nothing is looked at that could leave an evaluation out")

    def abandon(self, *, has_committed: bool) -> bool:
        return not has_committed

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        return True

    def give_gradients_to(self, writer: Hashable) -> None:
        pass
