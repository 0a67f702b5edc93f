"""The state of a step as its evaluations see it: they read variables where they lie, and leave the optimizer alone."""

from __future__ import annotations

from collections.abc import Hashable

from mirrorc.ir.program import Program
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.state_view import StateView


class EvaluationState(StateView):
    """What `StepState` is to training steps: an evaluation calls `take_over`, and then `finish` or `abandon`.

    It takes over what the user wrote to parameters and buffers. What changed in the optimizer is left to the next training step,
    and so is the plan of buckets. It may write buffers, as BatchNorm does in train mode, and nothing else.
    """

    def weight_of_loss(self, program: Program, examples: Examples) -> float:
        """There is no backward."""
        return 1.0

    def take_over(self, program: Program) -> None:
        """Takes over what the user wrote to variables since the last step."""
        self._state.take_over_variables(program)

    def needs_other_buckets(self, program: Program, *, is_stale: bool) -> bool:
        """An evaluation has no buckets."""
        return False

    def finish(self) -> None:
        """Called when all replicas are done; shows the buffers that were written. May be repeated."""
        self._state.store.aggregate()

    def skip(self, number: int) -> None:
        raise AssertionError("nothing is looked at that could leave an evaluation out")

    def abandon(self, *, has_committed: bool) -> bool:
        """Records that the evaluation has failed; returns whether the model is as it was."""
        return not has_committed

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        """An evaluation leaves the gradient buckets as they are."""
        return True

    def give_gradients_to(self, writer: Hashable) -> None:
        """They stay those of the last training step."""
