"""The state of a step, variables and optimizers, and its view in calls without updates."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.program import Accumulation, Program
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.devices.uninterrupted import completed
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients, Examples
from mirrorc.runtime.state.gradients.residuals import UnsentGradients
from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers, Laid
from mirrorc.runtime.state.optimizers.flat_optimizer import UpdateMemory
from mirrorc.runtime.state.optimizers.loss_scale import LossScale
from mirrorc.runtime.state.shared import shared_state
from mirrorc.runtime.state.shared.shared_state import Callers, HeldState, Hold
from mirrorc.runtime.state.shared.torn_state import TornState, refuse_torn
from mirrorc.runtime.state.variables.layout import FlatBucket, Layout, Moved, ReservedMemory
from mirrorc.runtime.state.variables.step_variables import SavedBuffers, StepVariables
from mirrorc.torch_internals import mark_optimizer_stepped


class StepState:
    """The state of all programs of one step: `prepare_for`, then `finish` or `abandon`.

    A step abandoned after its commit leaves the state inconsistent until the next `prepare_for`.

    Attributes:
        results: the last step's values for the caller, by name, such as the gradient norm.
        torn: the last partial update, restored or not; None without one.
    """

    def __init__(self, hold: Hold) -> None:
        self.num_skipped = 0
        self.results: dict[str, torch.Tensor] = {}
        self.loss_scale: LossScale | None = None
        self._hold = hold
        self._is_closed = False
        self.accumulated = AccumulatedGradients(self.store.devices)
        self.unsent = UnsentGradients(self.store.devices[0].torch_device)
        self._backup: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # backup of an undoable step
        self.torn: TornState | None = None
        self.saved_buffers = SavedBuffers()
        self.users_buckets: Sequence[FlatBucket] = ()  # of calls that leave gradients to the user

    @property
    def _held(self) -> HeldState:
        return self._hold.held

    @property
    def store(self) -> StepVariables:
        return self._hold.store

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        return self.store.buckets

    @property
    def optimizers(self) -> BucketOptimizers:
        return self._hold.optimizers

    @property
    def reserved(self) -> ReservedMemory:
        return self._held.reserved

    @property
    def is_whole(self) -> bool:
        """True if all variables and optimizer states are of the same step."""
        return self._held.is_whole and self.optimizers.is_whole

    @is_whole.setter
    def is_whole(self, is_whole: bool) -> None:
        self._held.is_whole = self.optimizers.is_whole = is_whole

    @property
    def layout(self) -> int:
        return self._held.layout

    @property
    def callers(self) -> Callers:
        return self._held.callers

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._held.let_go(self._hold)
            if self.loss_scale is not None:
                self.loss_scale.close()

    def begin_use(self) -> None:
        shared_state.begin_use(self._held)

    def take_in(
        self, outside: Mapping[str, torch.Tensor], counters: Mapping[str, str], written: Collection[str]
    ) -> None:
        shared_state.take_in(self._hold, outside, counters, written)

    def keep_only(self, names: Collection[str]) -> None:
        if self.store.drop_unless(names):
            self._held.release()

    def reads(self, constants: Collection[torch.Tensor]) -> None:
        shared_state.reads(self._held, constants)

    @property
    def is_behind(self) -> bool:
        """True if the user, or a step with separate state, has written variables since the last call."""
        return not self._is_closed and self._held.store.has_changes()

    @property
    def are_variables_written(self) -> bool:
        return self.is_behind or self._held.was_behind

    def catch_up(self) -> None:
        self._held.was_behind = self.are_variables_written
        if self._held.store.mirror_changes():
            self._held.layout += 1

    def accept(self) -> None:
        """Mirrors values received from another worker. They do not count as writes of the user."""
        self.catch_up()
        self._held.was_behind = False

    def prepare_for(self, program: Program, *, is_stale: bool | None = None) -> None:
        """Allocates memory for a program, and mirrors the user's changes since the last step."""
        self.accumulated.check(program)
        if program.accumulation in (Accumulation.ADDS, Accumulation.ENDS):
            self.accumulated.fit(program.buckets)
        else:
            self.accumulated.release()
        self.unsent.fit(program)
        optimizers = self.optimizers
        is_stale = optimizers.is_stale() if is_stale is None else is_stale
        user_steps = optimizers.user_steps
        was_whole = self.is_whole and not user_steps.have_written
        self.is_whole = False  # an error or an interrupt on the way leaves it so
        if not was_whole:
            self._held.store.mirror_all()
        if self._lay_out(program, is_new=not was_whole or is_stale):
            return_freed_memory()  # parameters and state have moved into buckets
        if self._held.store.mirror_changes(user_steps.of_others):
            self._held.layout += 1
        self.saved_buffers.write(self.store)
        optimizers.sync_hyperparameters()
        user_steps.mark_mirrored()
        self._held.was_behind = False
        self.is_whole = True

    def prepare_variables_for(self, program: Program, written: Collection[int] = ()) -> None:
        """Mirrors the user's writes for an evaluation, which needs no buckets. Parameters with ids in ``written`` count
        as written.

        If the user has given a parameter new memory, the buckets of its optimizers are dropped; until the next training
        step, parameters stay in the user's tensors.
        """
        self._held.was_behind = self.are_variables_written
        was_whole, self._held.is_whole = self._held.is_whole, False  # an error or an interrupt on the way leaves it so
        if not was_whole:
            self._held.store.mirror_all()
        self._lay_out(program, is_new=False)
        user_steps = self.optimizers.user_steps
        if self._held.store.mirror_changes({*user_steps.stepped(), *written}):
            self._held.layout += 1
        user_steps.of_others.clear()
        self._held.is_whole = was_whole

    def _lay_out(self, program: Program, *, is_new: bool) -> bool:
        """Lays out variables, and the optimizers' state if it moves with buckets or ``is_new``. Returns True if so."""
        layout = self.store.lay_out(program)
        has_state = layout.moved is Moved.BUCKETS or is_new
        laid = self.optimizers.lay_out(layout.planned.get(self.optimizers.owner, ())) if has_state else None
        if has_state or layout.homes:
            completed(lambda: self._put_in_place(layout, laid))
        else:
            self._held.store.adopt(layout)
        return has_state

    def _put_in_place(self, layout: Layout, laid: Laid | None) -> None:
        """Allocates nothing. It may be interrupted anywhere and repeated."""
        self._held.store.adopt(layout)
        if laid is not None:
            self.optimizers.adopt(laid)
        self._held.layout += 1

    def needs_other_buckets(self, program: Program, *, is_stale: bool) -> bool:
        """True if the buckets cannot hold the optimizer's state, or if rules for row updates have changed."""
        if self.optimizers.write_other_rows(program.buckets):
            return True
        is_to_move = is_stale or not self.store.has_buckets_of(program)
        return is_to_move and not self.optimizers.fits(self.store.in_store(program).buckets)

    def update_memory(self, bucket: Bucket) -> UpdateMemory:
        return self.optimizers.update_memory(bucket, self._parameters_of(bucket))

    def user_state_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        return self.optimizers.user_state_bytes([(bucket, self._parameters_of(bucket)) for bucket in buckets])

    def _parameters_of(self, bucket: Bucket) -> list[torch.Tensor]:
        return [self.store.tensors[slot.variable] for slot in bucket.slots]

    def begin_loss(self, program: Program, examples: Examples) -> float:
        """Begins loss scaling, residuals and accumulation of a step; returns the factor of the loss."""
        scale = self.scale_of_loss()
        self.unsent.begin(program, scale)
        return self.accumulated.begin_step(program, examples, scale)

    def scale_of_loss(self) -> float:
        return self.loss_scale.begin() if self.loss_scale is not None else 1.0

    def begin(self) -> None:
        """Backs up variables before the optimizer's first step, which may run out of memory.

        Not with a sharded optimizer: parameters of other workers may arrive after a failure.
        """
        if self.optimizers.is_fresh and not self.optimizers.are_sharded:
            tensors = (*self.store.written(), *self.optimizers.held())
            self._backup = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]

    def finish(self) -> None:
        self._backup = None
        self.optimizers.finish_step()
        self.store.count_update()
        self.store.aggregate()
        for optimizer in self.optimizers.groups.optimizers:
            mark_optimizer_stepped(optimizer)
        if self.loss_scale is not None:
            self.loss_scale.finish(has_overflowed=False)
        self.unsent.finish()
        self.accumulated.clear()
        self.is_whole = True

    def skip(self, number: int) -> None:
        """Ends a step with a skipped update, in place of `finish`; idempotent.

        Accumulated gradients are dropped, because they would stay non-finite.
        """
        self._backup = None
        self.accumulated.clear()
        self.num_skipped = number
        if self.loss_scale is not None:
            self.loss_scale.finish(has_overflowed=True)

    def abandon(self, *, has_committed: bool) -> bool:
        """Records a failed step; returns True if the model and the optimizer are unchanged.

        After a commit, variables may be partly updated, and replicas may differ.
        """
        self._held.gradients_writer = None
        backup, self._backup = self._backup, None
        if not has_committed:
            return True
        self.is_whole = False
        for tensor, copy in backup or ():
            tensor.copy_(copy)
        if backup is None:
            self.accumulated.clear()  # they may have been used in part
        return backup is not None

    def tear(self, clause: str) -> None:
        """Records a partial update by the abandoned step; ``clause`` names its buckets."""
        groups, tensors = self.optimizers.groups, self.store.tensors
        trained = groups.parameters()
        trained_tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) in trained}
        self.torn = TornState(clause, trained_tensors, groups.optimizers)

    def refuse_if_torn(self) -> None:
        refuse_torn(self._held.store.names.keys())

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        return self._held.gradients_writer == writer and self.optimizers.leave_gradients

    def give_gradients_to(self, writer: Hashable) -> None:
        """The former writer must have dropped its record of writes."""
        self._held.gradients_writer = writer


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
