"""The state of a step as the calls that accumulate gradients see it: they add to what is kept, and update nothing."""

from __future__ import annotations

from collections.abc import Hashable

from mirrorc.ir.program import Program
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients, Examples
from mirrorc.runtime.state.state_view import StateView
from mirrorc.runtime.state.step_state import StepState


class AccumulationState(StateView):
    """What `StepState` is to training steps: a call that accumulates uses `take_over`, and then `finish` or `abandon`.

    It lays memory out as a step does, so that both work in the same buckets, and takes over what the user wrote. It writes the
    buckets, buffers of the model, and the accumulated gradients.
    """

    @property
    def accumulated(self) -> AccumulatedGradients:
        """See `StepState`."""
        return self._state.accumulated

    def weight_of_loss(self, program: Program, examples: Examples) -> float:
        """See `StepState`: here, the weight with which the call's gradients are added to those of the others."""
        return self.accumulated.begin_call(program, examples, self._state.scale_of_loss())

    def take_over(self, program: Program, *, is_stale: bool | None = None) -> None:
        """Lays memory out for a program, and takes over what the user changed since the last call."""
        self._state.take_over(program, is_stale=is_stale)

    def needs_other_buckets(self, program: Program, *, is_stale: bool) -> bool:
        """See `StepState`."""
        return self._state.needs_other_buckets(program, is_stale=is_stale)

    def finish(self) -> None:
        """Called when all replicas are done; counts the call, and shows the buffers that were written. May be repeated."""
        self.accumulated.finish_call()
        self._state.store.aggregate()

    def skip(self, number: int) -> None:
        raise AssertionError("a call that accumulates raises an error or adds its gradients")

    def abandon(self, *, has_committed: bool) -> bool:
        """Records that the call has failed; returns whether model and accumulated gradients are as they were."""
        self.accumulated.is_torn = self.accumulated.is_torn or has_committed
        self._state.give_gradients_to(None)
        return not has_committed

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        """See `StepState`."""
        return self._state.keeps_gradients_of(writer)

    def give_gradients_to(self, writer: Hashable) -> None:
        """See `StepState`."""
        self._state.give_gradients_to(writer)


ProgramState = StepState | AccumulationState | EvaluationState
"""What a program runs on."""
