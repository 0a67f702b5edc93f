"""A step's state while gradients are computed for the user: variables in place, optimizer untouched."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.program import Program
from mirrorc.runtime.devices.events import reserve_for_caller
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.variables.layout import FlatBucket, memory_for_gradients, slot_views
from mirrorc.user.optimizer_kinds import sparse_gradient


class GradientState(EvaluationState):
    """The counterpart of `StepState` for calls that leave gradients in ``grad`` of the user's parameters.

    Parameters are read in place. Buckets have memory for gradients only, separate from the memory for updates.
    """

    def __init__(self, state: StepState) -> None:
        super().__init__(state)
        self._num_layouts = 0
        self._writer: Hashable = None  # of the gradients in buckets
        self._sums: dict[str, torch.Tensor] = {}  # of this call's gradients and those that were there

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        return self._state.users_buckets

    @property
    def layout(self) -> int:
        return self._state.layout + self._num_layouts

    def prepare_for(self, program: Program, *, is_stale: bool | None = None) -> None:
        written = self.store.ids_of_parameters()  # updates by hand need not count a version
        self._state.prepare_variables_for(program, written)
        self._state.saved_buffers.write(self.store)
        if tuple(flat.bucket for flat in self.buckets) != program.buckets:
            self._state.users_buckets = [self._laid_out(bucket) for bucket in program.buckets]
            self._num_layouts += 1
            self._writer = None

    def _laid_out(self, bucket: Bucket) -> FlatBucket:
        gradients = [memory_for_gradients(bucket, device.torch_device) for device in self.store.devices]
        slots = [slot_views(flat, bucket) if not bucket.rule.takes_rows else [] for flat in gradients]
        return FlatBucket(bucket, [], gradients, slots)

    def begin(self) -> None:
        self._sums = {}

    def add(self, bucket: int, reduced: torch.Tensor, unused: Set[int]) -> None:
        """Computes new gradients of a bucket's parameters for `finish`, in separate memory."""
        flat = self.buckets[bucket]
        for place, slot in enumerate(flat.bucket.slots):
            if place not in unused:
                present = self.store.tensors[slot.variable].grad
                gradient = _gradient(flat, reduced, place)
                with torch.no_grad():
                    self._sums[slot.variable] = gradient if present is None else _sum(present.detach(), gradient)

    def finish(self) -> None:
        super().finish()
        for name, total in self._sums.items():
            parameter = self.store.tensors[name]
            for part in (total._indices(), total._values()) if total.is_sparse else (total,):
                reserve_for_caller(part)
            if parameter.grad is None or parameter.grad.layout is not total.layout or total.is_sparse:
                parameter.grad = total
            elif parameter.grad is not total:
                with torch.no_grad():
                    parameter.grad.copy_(total)
        self._sums = {}

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        return self._writer == writer

    def give_gradients_to(self, writer: Hashable) -> None:
        self._writer = writer

    def abandon(self, *, has_committed: bool) -> bool:
        self._sums, self._writer = {}, None
        return super().abandon(has_committed=has_committed)


def _gradient(flat: FlatBucket, reduced: torch.Tensor, place: int) -> torch.Tensor:
    slot = flat.bucket.slots[place]
    if flat.bucket.rule.takes_rows:
        return sparse_gradient(flat.touched[0], reduced, slot.shape).clone()
    return slot_views(reduced, flat.bucket)[place].clone()


def _sum(present: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient + present if present.is_sparse and not gradient.is_sparse else present + gradient
