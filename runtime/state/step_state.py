"""The state of a step: its variables and its optimizers, and whether these are consistent.

It is long, as all that may happen to a step's state is told here.
"""

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
from mirrorc.runtime.state.shared import registry
from mirrorc.runtime.state.shared.call_owner import Callers
from mirrorc.runtime.state.shared.shared_state import HeldState, Hold
from mirrorc.runtime.state.shared.torn_state import TornState, refuse_torn
from mirrorc.runtime.state.variables.layout import Layout, Moved
from mirrorc.runtime.state.variables.reserved_memory import ReservedMemory
from mirrorc.runtime.state.variables.step_variables import StepVariables
from mirrorc.torch_internals import mark_optimizer_stepped


class StepState:
    """The state that all programs of one step share. Only this object knows whether the state is whole, and what changed last.

    A step calls `take_over`, and then `finish` or `abandon`. The state is whole unless a step was abandoned after it had
    committed; then `take_over` makes the state whole again.

    Args:
        hold: the step's hold of its variables, which other steps may hold, too.

    Attributes:
        num_skipped: the number of steps that have left their updates out.
        loss_scale: what the loss is multiplied by; None for nothing.
        accumulated: the gradients of calls since the last update.
        unsent: what this worker has not sent of its gradients, of which it sends a part in each step.
        told: what the last step told its caller, by name, such as the norm of its gradients.
        torn: what a step has left between two steps, whether it is restored by now or not; None if none has.
    """

    def __init__(self, hold: Hold) -> None:
        self.num_skipped = 0
        self.told: dict[str, torch.Tensor] = {}
        self.loss_scale: LossScale | None = None
        self._hold = hold
        self._is_closed = False
        self.accumulated = AccumulatedGradients(self.store.devices)
        self.unsent = UnsentGradients(self.store.devices[0].torch_device)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # what undoes the step, if it can be undone
        self.torn: TornState | None = None

    @property
    def _held(self) -> HeldState:
        """What other steps may hold, too."""
        return self._hold.held

    @property
    def store(self) -> StepVariables:
        """What the step sees of the variables."""
        return self._hold.store

    @property
    def optimizers(self) -> BucketOptimizers:
        """The optimizers' state and updates."""
        return self._hold.optimizers

    @property
    def reserved(self) -> ReservedMemory:
        """Memory for large results of regions, which no step reads that did not write it."""
        return self._held.reserved

    @property
    def is_whole(self) -> bool:
        """Whether variables and optimizers are those of some step, not of two in part."""
        return self._held.is_whole and self.optimizers.is_whole

    @property
    def layout(self) -> int:
        """The number of the present layout of memory; when it changes, views of the memory must be made anew."""
        return self._held.layout

    @property
    def callers(self) -> Callers:
        """Who calls a step over these variables now."""
        return self._held.callers

    def close(self) -> None:
        """Called when the step is closed, perhaps several times; other steps go on with what they hold."""
        if not self._is_closed:
            self._is_closed = True
            self._held.let_go(self._hold)
            if self.loss_scale is not None:
                self.loss_scale.close()

    def begin_use(self) -> None:
        """See `mirrorc.runtime.state.shared.registry.begin_use`."""
        registry.begin_use(self._held)

    def take_in(
        self, outside: Mapping[str, torch.Tensor], counters: Mapping[str, str], written: Collection[str]
    ) -> None:
        """See `mirrorc.runtime.state.shared.registry.take_in`."""
        registry.take_in(self._hold, outside, counters, written)

    def keep_only(self, names: Collection[str]) -> None:
        """Lets go what was taken in under other names."""
        if self.store.drop_unless(names):
            self._held.release()

    def reads(self, constants: Collection[torch.Tensor]) -> None:
        """See `mirrorc.runtime.state.shared.registry.reads`."""
        registry.reads(self._held, constants)

    @property
    def is_behind(self) -> bool:
        """Whether the user, or a step that holds a state of its own, has written to variables since the last call."""
        return not self._is_closed and self._held.store.has_changes()

    @property
    def are_variables_written(self) -> bool:
        """Whether the user has written to variables since the last training step, whatever has taken that over since."""
        return self.is_behind or self._held.was_behind

    def catch_up(self) -> None:
        """Mirrors what was written, so that all replicas have it."""
        self._held.was_behind = self.are_variables_written
        if self._held.store.mirror_changes():
            self._held.layout += 1

    def take_over(self, program: Program, *, is_stale: bool | None = None) -> None:
        """Lays memory out for a program, and takes over what the user changed since the last step.

        ``is_stale`` is what `BucketOptimizers.is_stale` says, if the caller knows: it takes some microseconds to tell.

        Raises:
            ValueError, ExecutionError: see `AccumulatedGradients.check` and `VariableStore.lay_out`.
        """
        self.accumulated.check(program)
        if program.accumulation is not Accumulation.NONE:
            self.accumulated.fit(program.buckets)
        else:
            self.accumulated.release()
        self.unsent.fit(program)
        is_stale = self.optimizers.is_stale() if is_stale is None else is_stale
        was_whole = self._held.is_whole and self.optimizers.is_whole and not self.optimizers.user_steps.have_written
        self._held.is_whole = self.optimizers.is_whole = False  # an error or an interrupt on the way leaves it so
        if not was_whole:
            self._held.store.mirror_all()
        layout = self.store.lay_out(program)
        if layout.moved is Moved.BUCKETS or not was_whole or is_stale:
            laid = self.optimizers.lay_out(layout.planned[self.optimizers.owner])
            completed(lambda: self._put_in_place(layout, laid))
            return_freed_memory()  # parameters and state have moved into buckets
        elif layout.homes:
            completed(lambda: self._put_in_place(layout, None))
        else:
            self._held.store.adopt(layout)
        user_steps = self.optimizers.user_steps
        if self._held.store.mirror_changes(user_steps.of_others):
            self._held.layout += 1
        self.optimizers.sync_hyperparameters()
        user_steps.have_written = False
        user_steps.of_others.clear()
        self._held.was_behind = False
        self._held.is_whole = self.optimizers.is_whole = True

    def take_over_variables(self, program: Program) -> None:
        """Takes over what the user wrote to variables, for a program that evaluates: it reads them where they lie.

        The optimizer's state, and what the user did to it, is left to the next training step. Buckets stay as they are, unless
        the user has given a parameter other memory: then all parameters lie where the user has them, until that step.
        """
        self._held.was_behind = self.are_variables_written
        was_whole, self._held.is_whole = self._held.is_whole, False  # an error or an interrupt on the way leaves it so
        if not was_whole:
            self._held.store.mirror_all()
        layout = self.store.lay_out(program)
        if layout.moved is Moved.BUCKETS:
            laid = self.optimizers.lay_out(layout.planned.get(self.optimizers.owner, ()))
            completed(lambda: self._put_in_place(layout, laid))
        elif layout.homes:
            completed(lambda: self._put_in_place(layout, None))
        else:
            self._held.store.adopt(layout)
        user_steps = self.optimizers.user_steps
        if self._held.store.mirror_changes(user_steps.stepped()):
            self._held.layout += 1
        user_steps.of_others.clear()
        self._held.is_whole = was_whole

    def _put_in_place(self, layout: Layout, laid: Laid | None) -> None:
        """Puts a layout in place that was made aside; allocates nothing, and may be repeated from any point."""
        self._held.store.adopt(layout)
        if laid is not None:
            self.optimizers.adopt(laid)
        self._held.layout += 1

    def needs_other_buckets(self, program: Program, *, is_stale: bool) -> bool:
        """Whether a program's buckets cannot hold the optimizer's present state, or optimizers now write other rows of its tables
        than the program takes them to, so that buckets must be planned anew.

        ``is_stale`` is what `BucketOptimizers.is_stale` says.
        """
        if self.optimizers.write_other_rows(program.buckets):
            return True
        is_to_move = is_stale or not self.store.has_buckets_of(program)
        return is_to_move and not self.optimizers.fits(self.store.in_store(program).buckets)

    def update_memory(self, bucket: Bucket) -> UpdateMemory:
        """See `BucketOptimizers.update_memory`; of a bucket of a program, also when the step is closed."""
        return self.optimizers.update_memory(bucket, self._parameters_of(bucket))

    def own_state_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        """See `BucketOptimizers.own_state_bytes`; of buckets of a program."""
        return self.optimizers.own_state_bytes([(bucket, self._parameters_of(bucket)) for bucket in buckets])

    def _parameters_of(self, bucket: Bucket) -> list[torch.Tensor]:
        return [self.store.tensors[slot.variable] for slot in bucket.slots]

    def weight_of_loss(self, program: Program, examples: Examples) -> float:
        """Called before a step of so many examples: what its loss is multiplied by before backward, besides its weights."""
        scale = self.scale_of_loss()
        self.unsent.begin(program, scale)
        return self.accumulated.begin_step(program, examples, scale)

    def scale_of_loss(self) -> float:
        """Called before a step: the scale of its loss, with which small gradients are not rounded to zero."""
        return self.loss_scale.begin() if self.loss_scale is not None else 1.0

    def begin(self) -> None:
        """Called before a step. One in which the optimizer makes its state, which may fail for lack of memory, can be undone,
        unless parameters of other workers may still come in when it has failed."""
        if self.optimizers.is_fresh and not self.optimizers.are_sharded:
            self._kept = [(own, own.to("cpu", copy=True)) for own in (*self.store.written(), *self.optimizers.held())]

    def finish(self) -> None:
        """Called when all replicas are done; shows the new state in the user's model and optimizer. May be repeated."""
        self._kept = None
        self.optimizers.finish_step()
        self.store.count_update()
        self.store.aggregate()
        for optimizer in self.optimizers.groups.optimizers:
            mark_optimizer_stepped(optimizer)
        if self.loss_scale is not None:
            self.loss_scale.finish(has_overflowed=False)
        self.unsent.finish()
        self.accumulated.clear()
        self._held.is_whole = self.optimizers.is_whole = True

    def skip(self, number: int) -> None:
        """Called in place of `finish` if all replicas have left updates out, for the ``number``-th time. May be repeated.

        Accumulated gradients are used up, as if the loop went on with ``zero_grad()``: one that is not finite would stay so.
        """
        self._kept = None
        self.accumulated.clear()
        self.num_skipped = number
        if self.loss_scale is not None:
            self.loss_scale.finish(has_overflowed=True)

    def abandon(self, *, has_committed: bool) -> bool:
        """Records that the step has failed: the content of the gradient buckets is unknown.

        If it had committed, variables may have changed in part, and replicas may differ.

        Returns:
            Whether the model and the optimizer are as they were before the step.
        """
        self._held.gradients_writer = None
        kept, self._kept = self._kept, None
        if not has_committed:
            return True
        self._held.is_whole = self.optimizers.is_whole = False
        for own, copy in kept or ():
            own.copy_(copy)
        if kept is None:
            self.accumulated.clear()  # they may have been used in part
        return kept is not None

    def tear(self, what: str) -> None:
        """Records that the step that was abandoned has updated a part of its buckets; ``what`` says which.

        Until the user has restored parameters and optimizers, nothing spreads what the first replica has, see `TornState`.
        """
        groups, tensors = self.optimizers.groups, self.store.tensors
        trained = groups.parameters()
        own = {name: tensor for name, tensor in tensors.items() if id(tensor) in trained}
        self.torn = TornState(what, own, groups.optimizers)

    def refuse_if_torn(self) -> None:
        """Refuses to show variables that a step has left between two steps.

        Raises:
            ExecutionError: see `mirrorc.runtime.state.shared.torn_state.TornState.refuse`.
        """
        refuse_torn(self._held.store.names.keys())

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        """Whether the gradient buckets still hold what this writer has left there.

        They do not after a step of another writer, after a failure, or with optimizers that use the memory of gradients.
        """
        return self._held.gradients_writer == writer and self.optimizers.leave_gradients

    def give_gradients_to(self, writer: Hashable) -> None:
        """Sets the writer of the gradient buckets, once it has forgotten what it had left in buckets that others wrote since."""
        self._held.gradients_writer = writer
