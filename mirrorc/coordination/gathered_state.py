"""The optimizer's state of all workers, made whole on each of them, of which each has a part."""

from __future__ import annotations

from mirrorc.coordination.coordinator import JointCalls
from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.runtime.state.step_state import StepState


def gather_state(joint: JointCalls, state: StepState) -> None:
    """Makes the optimizer's state whole on all workers, all of which call it.

    Args:
        joint: the calls of the step.
        state: of the step.

    Raises:
        ExecutionError: this worker is inside of `mirrorc.step.Step.join`, where others may have left.
        CommunicationError: another worker makes another call, or has loaded state where others have not.
    """
    if joint.before_call is not None:
        raise ExecutionError(
            "step.gather_optimizer_state() was called inside of step.join(), where a worker that has left makes no calls of its "
            "own: call it on all workers after the block"
        )
    with joint.call():
        state.refuse_if_torn()
        is_whole = not state.optimizers.is_dealt
        if joint.meet_besides("step.gather_optimizer_state()", has_changed=is_whole).takes_over:
            with joint.team.words.raising_alike():
                raise CommunicationError(
                    "the workers have no parts of one state of the optimizer: some have loaded or cleared it since the last "
                    "step, and others have not, or that step has failed while it updated. Nothing was changed. Load it on all "
                    "workers, make a step, and call step.gather_optimizer_state() then"
                )
        if not is_whole:
            state.optimizers.gather(joint.team.words.gather)
        joint.team.finish()
