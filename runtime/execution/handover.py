"""What the steps of a program hand over to the next one: buckets in flight, which that waits for and updates."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch

from mirrorc.analysis.communication.handed_over import handed_over
from mirrorc.ir.program import Program
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.devices.uninterrupted import completed
from mirrorc.runtime.execution.commit.update_progress import UpdateProgress
from mirrorc.runtime.execution.failures import explain_failure, note_if_torn
from mirrorc.runtime.execution.tail import Tail
from mirrorc.runtime.state.accumulation_state import ProgramState
from mirrorc.runtime.state.step_state import StepState


class Handover:
    """Keeps what a step has handed over, until it is done.

    Args:
        program: a LOWERED program.
        state: the variables and the optimizer.
        communicators: which carry the buckets.
        progress: notes the updates of a program that commits early; None for another one.
        timeout_seconds: the longest time that a replica waits for another one.

    Attributes:
        tail: what is left of the last step, which has returned; None if nothing is.
    """

    def __init__(
        self,
        program: Program,
        state: ProgramState,
        communicators: Collection[Communicator],
        progress: UpdateProgress | None,
        timeout_seconds: float,
    ) -> None:
        self._program, self._state, self._progress = program, state, progress
        self._communicators, self._timeout_seconds = communicators, timeout_seconds
        self._late_buckets = tuple(handed_over(next(iter(program.device_graphs.values())).graph))
        self._parts: list[Any] = []  # the rest of a step that hands over, of each replica
        self._is_due = False  # whether the step that runs hands over
        self.tail: Tail | None = None

    @property
    def stops_at_loss(self) -> bool:
        """Whether the functions of the program give the loss first, and then go on."""
        return bool(self._late_buckets)

    def begin(self) -> None:
        """Begins a step."""
        self._parts = [None] * self._program.num_replicas
        self._is_due = bool(self._late_buckets) and self._can_be_done_later

    @property
    def _can_be_done_later(self) -> bool:
        """Whether the next step may update buckets of the one that begins: not if it makes state of optimizers, which can be
        undone as long as it has not returned, nor with hyperparameters in tensors, which schedulers write in place meanwhile."""
        optimizers = self._state_of_step.optimizers
        return not (optimizers.makes_state_of(self._late_buckets) or optimizers.have_tensors)

    @property
    def _state_of_step(self) -> StepState:
        assert isinstance(self._state, StepState), "a program that hands over trains"
        return self._state

    def run(self, replica: int, part: Iterator[Any]) -> torch.Tensor | None:
        """Runs a replica's step until it gives its loss, or to its end, if the step does not hand over."""
        loss: torch.Tensor | None = next(part)
        if self._is_due:
            self._parts[replica] = part
        else:
            for _ in part:
                pass
        return loss

    def keep(self) -> None:
        """Called when a step is made: keeps what it hands over, if anything. May be repeated."""
        if not self._is_due:
            return
        for communicator in self._communicators:
            communicator.keep(self._late_buckets)
        self.tail = self.tail or Tail(
            self._parts, self._late_buckets, self._program.devices, self._timeout_seconds, self._let_go
        )

    def _let_go(self, bucket: int) -> None:
        for communicator in self._communicators:
            communicator.let_go(bucket)

    def await_update(self, replica: int, bucket: int) -> None:
        """Returns when the step before has updated a bucket, whose hyperparameters are those of this step from then on."""
        if self.tail is not None:
            self.tail.await_update(replica, bucket)
            self._state_of_step.optimizers.sync_bucket(bucket, replica)

    def forget(self) -> None:
        """Called when nothing is left of the step before."""
        self.tail = None

    def wake(self) -> None:
        """Wakes replicas that wait for others to update what the step before has left; they raise `Aborted`."""
        if self.tail is not None:
            self.tail.wake()

    def finish(self, pool: DevicePool) -> BaseException | None:
        """Does what is left of the last step; the step's state then counts what the step has written.

        Returns:
            What has interrupted the caller meanwhile, though all is done, and is to be raised; None for nothing.

        Raises:
            ExecutionError, CommunicationError: it has failed, and parameters are between two steps.
        """
        tail = self.tail
        if tail is None:
            return None
        interruption = None
        if not (tail.is_done or tail.failures):
            jobs = [functools.partial(tail.finish, replica) for replica in range(self._program.num_replicas)]
            try:
                pool.run(jobs, lambda: self._abort() if tail.failures else None)  # an interrupt stops nothing
            except BaseException as error:
                if not tail.is_done:
                    self._tear()
                    note_if_torn(error, self._program, True, self._told)
                    raise
                interruption = error
        if not tail.is_done:
            self._tear()
            raise explain_failure(self._program, tail.failures, True, self._told)
        completed(self._state_of_step.finish_updates)
        self.tail = None
        return interruption

    @property
    def _told(self) -> str:
        return self._progress.told_if_begun() if self._progress is not None else ""

    def _abort(self) -> None:
        for communicator in self._communicators:
            communicator.abort_kept()

    def _tear(self) -> None:
        """Records that what is left of the last step has failed: parameters are between two steps."""
        assert self._progress is not None, "a program that hands over commits early"
        self.tail = None
        self._abort()
        for communicator in self._communicators:
            communicator.begin_afresh()
        self._state_of_step.abandon(has_committed=True)
        self._state_of_step.tear(self._progress.told())
