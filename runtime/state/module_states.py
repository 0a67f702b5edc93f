"""A step's state during forward and backward of a module, whose loss and updates are the user's."""

from __future__ import annotations

from collections.abc import Set

import torch

from mirrorc.ir.program import Program
from mirrorc.runtime.devices.events import reserve_for_caller
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradient_state import GradientState
from mirrorc.runtime.state.variables.layout import slot_views
from mirrorc.user.optimizer_kinds import sparse_gradient


class ForwardState(EvaluationState):
    """Parameters count as written before each call, because updates by hand may leave the version unchanged."""

    def prepare_for(self, program: Program, *, is_stale: bool | None = None) -> None:
        self._state.prepare_variables_for(program, self._state.store.ids_of_parameters())
        self._state.saved_buffers.write(self.store)


class BackwardState(GradientState):
    """Returns gradients to the caller, in separate memory: each is a view of a copy of its bucket's sum."""

    def add(self, bucket: int, reduced: torch.Tensor, unused: Set[int]) -> None:
        flat = self.buckets[bucket]
        if flat.bucket.rule.takes_rows:
            slot = flat.bucket.slots[0]
            self._sums[slot.variable] = sparse_gradient(flat.touched[0], reduced, slot.shape).clone()
            return
        whole = reduced.clone()
        reserve_for_caller(whole)
        for place, (slot, view) in enumerate(zip(flat.bucket.slots, slot_views(whole, flat.bucket), strict=True)):
            if place not in unused:
                self._sums[slot.variable] = view

    def finish(self) -> None:
        EvaluationState.finish(self)

    def take(self) -> dict[str, torch.Tensor]:
        sums, self._sums = self._sums, {}
        return sums
