"""The state of calls without updates, as a view of a step's state."""

from __future__ import annotations

from collections.abc import Sequence

from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.variables.layout import FlatBucket
from mirrorc.runtime.state.variables.reserved_memory import ReservedMemory
from mirrorc.runtime.state.variables.step_variables import StepVariables


class StateView:
    def __init__(self, state: StepState) -> None:
        self._state = state

    @property
    def store(self) -> StepVariables:
        return self._state.store

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        return self._state.buckets

    @property
    def optimizers(self) -> BucketOptimizers:
        return self._state.optimizers

    @property
    def reserved(self) -> ReservedMemory:
        return self._state.reserved

    @property
    def layout(self) -> int:
        return self._state.layout

    @property
    def num_skipped(self) -> int:
        return self._state.num_skipped

    def begin(self) -> None:
        pass
