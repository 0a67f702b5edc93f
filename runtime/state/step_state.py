"""The state of a step: its variables and its optimizer, and whether these are consistent."""

from __future__ import annotations

from collections.abc import Hashable

from mirrorc.ir.program import Program
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.state.bucket_optimizers import BucketOptimizers, Laid
from mirrorc.runtime.state.completion import completed
from mirrorc.runtime.state.variables import Layout, Moved, VariableStore
from mirrorc.torch_internals import mark_optimizer_stepped


class StepState:
    """The state that all programs of one step share. Only this object knows whether the state is whole, and what changed last.

    A step calls `take_over`, `begin`, and then `finish` or `abandon`. The state is whole from `finish` to the next `begin`. If a
    step did not finish but changed variables, `take_over` makes the state whole again.

    Args:
        store: the variables of all replicas.
        optimizers: the optimizer's state and updates.

    Attributes:
        layout: the number of the present layout of memory; when it changes, views of the memory must be made anew.
        has_updated: whether the present step, or otherwise the last one, has changed variables.
    """

    def __init__(self, store: VariableStore, optimizers: BucketOptimizers) -> None:
        self.store = store
        self.optimizers = optimizers
        self.layout = 0
        self.has_updated = False
        self._is_whole = True
        self._gradients_writer: Hashable = None  # the writer of the gradients in the buckets; None after a failure

    def take_over(self, program: Program) -> None:
        """Lays memory out for a program, and takes over what the user changed since the last step."""
        was_whole, self._is_whole = self._is_whole, False  # an error or an interrupt on the way leaves it so
        was_whole = was_whole and not self.optimizers.user_steps.have_written
        if not was_whole:
            self.store.mirror_all()
        layout = self.store.lay_out(program)
        if layout.moved is Moved.BUCKETS or not was_whole or self.optimizers.is_stale():
            laid = self.optimizers.lay_out(layout.buckets)
            completed(lambda: self._put_in_place(layout, laid))
            return_freed_memory()  # parameters and state have moved into buckets
        elif layout.homes:
            completed(lambda: self._put_in_place(layout, None))
        if self.store.mirror_changes():
            self.layout += 1
        self.optimizers.sync_hyperparameters()
        self.optimizers.user_steps.have_written = False
        self._is_whole = True

    def _put_in_place(self, layout: Layout, laid: Laid | None) -> None:
        """Puts a layout in place that was made aside; allocates nothing, and may be repeated from any point."""
        self.store.adopt(layout)
        if laid is not None:
            self.optimizers.adopt(laid)
        self.layout += 1

    def needs_other_buckets(self, program: Program) -> bool:
        """Whether a program's buckets cannot hold the optimizer's present state, so that they must be planned anew."""
        is_to_move = self.store.plan != program.buckets or self.optimizers.is_stale()
        return is_to_move and not self.optimizers.fits(program.buckets)

    def begin(self) -> None:
        """Records that a step begins, which may change variables from now on."""
        self._is_whole = False
        self.has_updated = False

    def finish(self) -> None:
        """Called when all replicas are done; shows the new state in the user's model and optimizer."""
        self.optimizers.finish_step()
        self.store.aggregate()
        mark_optimizer_stepped(self.optimizers.user_optimizer)
        self._is_whole = True

    def abandon(self) -> None:
        """Records that the step has failed: the content of the gradient buckets is unknown, and replicas may differ."""
        self._gradients_writer = None

    def keeps_gradients_of(self, writer: Hashable) -> bool:
        """Whether the gradient buckets still hold what this writer has left there.

        They do not after a step of another writer, after a failure, or with optimizers that use the memory of gradients.
        """
        return self._gradients_writer == writer and self.optimizers.leave_gradients

    def give_gradients_to(self, writer: Hashable) -> None:
        """Sets the writer of the gradient buckets, once it has forgotten what it had left in buckets that others wrote since."""
        self._gradients_writer = writer
