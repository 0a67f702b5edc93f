"""A step's state during gradient accumulation, without updates."""

from __future__ import annotations

from collections.abc import Hashable

from mirrorc.ir.program import Program
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients, Examples
from mirrorc.runtime.state.step_state import StateView, StepState


class AccumulationState(StateView):
    """The counterpart of `StepState` for accumulating calls: `prepare_for`, then `finish` or `abandon`."""

    @property
    def accumulated(self) -> AccumulatedGradients:
        return self._state.accumulated

    def begin_loss(self, program: Program, examples: Examples) -> float:
        return self.accumulated.begin_call(program, examples, self._state.scale_of_loss())

    def prepare_for(self, program: Program, *, is_stale: bool | None = None) -> None:
        self._state.prepare_for(program, is_stale=is_stale)

    def needs_other_buckets(self, program: Program, *, is_stale: bool) -> bool:
        return self._state.needs_other_buckets(program, is_stale=is_stale)

    def finish(self) -> None:
        self.accumulated.finish_call()
        self._state.store.aggregate()

    def skip(self, number: int) -> None:
        raise AssertionError("a call that accumulates raises an error or adds its gradients")

    def abandon(self, *, has_committed: bool) -> bool:
        if has_committed:
            self.accumulated.mark_torn()
        self._state.give_gradients_to(None)
        return not has_committed

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        return self._state.keeps_gradients_of(writer)

    def give_gradients_to(self, writer: Hashable) -> None:
        self._state.give_gradients_to(writer)


ProgramState = StepState | AccumulationState | EvaluationState
