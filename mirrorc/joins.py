"""`join`: one block around the calls of several steps, for data that ends earlier on some workers than on others."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mirrorc.coordination.uneven_inputs import until_all_have_left
from mirrorc.step import Step


def join(*steps: Step) -> AbstractContextManager[None]:
    """A block for a loop that calls several steps, and that may end earlier on some workers than on others.

    ``with mirrorc.join(d_step, g_step):``, on every worker, does for each of the steps what `Step.join` does for one. A worker
    that comes to its end takes part in the training calls of the others, of whichever step they call. For that all workers
    meet once more before each call, over the connections of the first step, of which nothing is in flight then.

    Args:
        *steps: those that are called in the block, in one order on all workers. Those of a process on its own do nothing here.

    Raises:
        TypeError, ValueError: there are none, one is no step, is there twice, or has other workers than the first.
        ExecutionError, CommunicationError: as `Step.join`; and by a call in the block, on all workers, if some call another step
            than others.
    """
    others = [step for step in steps if not isinstance(step, Step)]
    if others or not steps:
        given = f"was given a {type(others[0]).__name__}" if others else "was given nothing"
        raise TypeError(
            f"mirrorc.join {given}: give it the steps of mirrorc.compile that the block calls, join(d_step, g_step)"
        )
    if len(set(map(id, steps))) < len(steps):
        raise ValueError("mirrorc.join was given a step twice: give it each once")
    joined = [own for step in steps for own in step.joined()]
    if len({id(own.joint.team.cluster) for own in joined}) > 1:
        raise ValueError(
            "mirrorc.join was given steps of different workers, which cannot tell each other whose turn it is: compile all "
            "of them with one process_group"
        )
    return until_all_have_left(joined)
