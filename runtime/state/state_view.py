"""The state of a step as calls see it that do not update: they have its variables and its layout, and write less."""

from __future__ import annotations

from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.variables.reserved_memory import ReservedMemory
from mirrorc.runtime.state.variables.step_variables import StepVariables


class StateView:
    """What calls share that stand in the place of a training step, over its state.

    Args:
        state: that of the training steps, which has the same variables.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state

    @property
    def store(self) -> StepVariables:
        """See `StepState`."""
        return self._state.store

    @property
    def optimizers(self) -> BucketOptimizers:
        """See `StepState`."""
        return self._state.optimizers

    @property
    def reserved(self) -> ReservedMemory:
        """See `StepState`."""
        return self._state.reserved

    @property
    def layout(self) -> int:
        """See `StepState`."""
        return self._state.layout

    @property
    def num_skipped(self) -> int:
        """See `StepState`."""
        return self._state.num_skipped

    def begin(self) -> None:
        """Nothing is made before a call that would have to be undone: there is no update."""
