"""What is left of a step that has returned with buckets in flight, and who has it done before the next step does."""

from __future__ import annotations

from collections.abc import Callable

from mirrorc.coordination.coordinator import JointCalls
from mirrorc.coordination.read_hooks import ReadGuards
from mirrorc.errors import ExecutionError
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.shared.in_flight_step import UnfinishedStep
from mirrorc.runtime.state.step_state import StepState


class RestOfStep:
    """The buckets that the last call of a step has left to update; with ``overlap_next_step``, over several workers.

    Args:
        options, state, joint: those of the step.
        finish_exclusively: finishes it while no other call runs; a method, whose object is not kept.
        is_left: a method of the same object, which gives `is_left`.
    """

    def __init__(
        self,
        options: StepOptions,
        state: StepState,
        joint: JointCalls,
        finish_exclusively: Callable[[], object],
        is_left: Callable[[], bool],
    ) -> None:
        self._state, self._joint = state, joint
        self._parameters = options.optimizers.parameters
        self._guards = ReadGuards(options.model, options.optimizers.optimizers, finish_exclusively, is_left)
        self._last: tuple[Executor, DevicePool] | None = None
        self._step: object = None  # the step, as long as something is left of it, so that guards can finish it

    @property
    def is_left(self) -> bool:
        """Whether buckets are left to update."""
        return self._state.unfinished is not None

    def note(self, step: object, executor: Executor, pool: DevicePool) -> None:
        """Called when a step is made: notes what it has left, if anything, and that nothing is left of the one before."""
        self._end()
        if executor.tail is not None:
            self._step, self._last = step, (executor, pool)
            self._state.unfinished = UnfinishedStep(self._parameters(), executor.tail.buckets, self.finish)
            self._joint.team.finish_rest = self.finish

    def begin_next(self) -> None:
        """Called when a call begins that may go on with it.

        Raises:
            ExecutionError: parameters or the optimizer's state were written meanwhile; nothing is left then.
        """
        self._guards.take_off()
        if self._state.is_written_in_flight:
            self.finish()

    def end_call(self) -> None:
        """Called when a training call ends, whether it has made a step or not."""
        if self.is_left:
            self._guards.put_on()

    def finish_unless(self, executor: Executor) -> bool:
        """Does it, unless the program that is to run goes on with it; says whether it did. Raises as `finish`."""
        if self._last is None or self._last[0] is executor:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Does what is left, if anything is; within a call of the step, or of another one over its variables, or between calls.

        Raises:
            ExecutionError: parameters or the optimizer's state were written meanwhile; nothing is left then.
            CommunicationError: another worker has failed, or an update of this one: parameters are between two steps.
        """
        if self._last is None:
            return
        executor, pool = self._last
        tail = executor.tail
        is_written = tail is not None and tail.is_untouched and self._state.is_written_in_flight
        try:
            with self._joint.rest_of_call():
                interruption = executor.finish_tail(pool)
        finally:
            self._end()
        if interruption is not None:
            raise interruption
        if is_written:
            raise ExecutionError(
                "parameters or the optimizer's state were written while buckets of the last step were in flight "
                "(overlap_next_step=True), and updated after that. Nothing is in flight any more: write them again, and from now "
                "on call step.synchronize() before you write"
            )

    def _end(self) -> None:
        """Notes that nothing is left."""
        if self._state.unfinished is not None:
            self._state.unfinished.end()
        self._state.unfinished = self._last = self._step = None
        self._joint.team.finish_rest = _nothing
        self._guards.take_off()

    def close(self) -> None:
        """Called when the step is closed; may be repeated."""
        self._guards.close()


def _nothing() -> None:
    pass
