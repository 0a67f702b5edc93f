"""Calls in which a worker takes part after it has left its own loop, until all workers have left theirs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from mirrorc.coordination.coordinator import JointCalls
from mirrorc.errors import ExecutionError
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.user.optimizer_groups import OptimizerGroups

_around: ContextVar[Block | None] = ContextVar("the block in which this thread is", default=None)


@dataclasses.dataclass(frozen=True)
class JoinedStep:
    """What a block needs of a step over several workers.

    Attributes:
        joint: its calls.
        take_part: takes part in one call of the others; gives whether there may be another one.
        exclusively: calls a function while no call of the step runs.
        is_closed: whether the step is closed, which the others are told.
    """

    joint: JointCalls
    take_part: Callable[[], bool]
    exclusively: Callable[[Callable[[], Any]], Any]
    is_closed: Callable[[], bool]


class Block:
    """A loop in which a worker calls some steps, and behind it its part in the calls of those whose loops still run.

    Where there are several steps, a worker that has left does not know which one the others call next. So before each call all
    meet over the connections of the first step, where those who call say which; they refuse there to call different ones, too.

    Args:
        steps: those of the block, in the same order on all workers.
    """

    def __init__(self, steps: Sequence[JoinedStep]) -> None:
        self._steps = steps
        self.joints = [step.joint for step in steps]

    def _begin_call(self, joint: JointCalls) -> None:
        if len(self._steps) > 1:
            self._take_turn(self.joints.index(joint))

    def take_part_until_all_have_left(self) -> None:
        """Takes part in the calls of the others until there are none any more."""
        first = self._steps[0]
        while not first.is_closed():
            number = self._take_turn(0) if len(self._steps) > 1 else 0
            if number is None or not self._steps[number].take_part():
                return

    def _take_turn(self, number: int) -> int | None:
        """Says that this worker calls a step next, unless it has left; gives the number of the step that is called, or None."""
        first = self._steps[0]
        agreed: Agreement = first.exclusively(lambda: _met(first.joint, number))
        return None if agreed.is_over else agreed.turn

    def abandon(self, error: BaseException) -> None:
        """Ends the next call of the others, whatever that is."""
        for joint in self.joints:
            joint.team.abandon(error)

    def mark(self, *, is_joining: bool, has_left: bool) -> None:
        """Notes where this worker is."""
        for joint in self.joints:
            joint.before_call = functools.partial(self._begin_call, joint) if is_joining else None
            joint.has_left = has_left


def _met(first: JointCalls, number: int) -> Agreement:
    with first.call():
        agreed = first.meet_before(number)
        first.team.finish()
    return agreed


def begin_call(joint: JointCalls) -> None:
    """Called before a step over several workers is called.

    Raises:
        ExecutionError: this thread is in the block of other steps.
        CommunicationError: the workers call different steps of their block; or one of them has failed.
    """
    refuse_within_others(joint, "a step was called")
    if joint.before_call is not None:
        joint.before_call()


def refuse_within_others(joint: JointCalls, what: str) -> None:
    """Refuses what all workers do together with a step, in a block of others, where some of them may have left.

    Args:
        joint: the calls of the step.
        what: it does.

    Raises:
        ExecutionError: this thread is in such a block.
    """
    around = _around.get()
    if around is not None and joint not in around.joints:
        raise ExecutionError(
            f"{what} inside of step.join() of another step: a worker that has left that block takes part in the calls of its "
            "step alone, so that the two would wait for each other. Put one block around the calls of both, with "
            "mirrorc.join(one_step, other_step)"
        )


@contextmanager
def until_all_have_left(steps: Sequence[JoinedStep]) -> Iterator[None]:
    """A block at whose end a worker takes part in the calls of the others until they have come to the end of theirs, too.

    What is raised in it ends the next call of the others.

    Args:
        steps: those of the block; none for a process on its own, which waits for nobody.

    Raises:
        ExecutionError: the block is inside of another one, of these steps or of others.
    """
    if not steps:
        yield
        return
    block = Block(steps)
    for joint in block.joints:
        if joint.before_call is not None:
            raise ExecutionError(
                "step.join() was entered inside of step.join(): one block around the loop is enough, leave the inner one out"
            )
        refuse_within_others(joint, "step.join() was entered")
    block.mark(is_joining=True, has_left=False)
    token = _around.set(block)
    try:
        yield
        block.mark(is_joining=True, has_left=True)
        with ExitStack() as keeping:
            for joint in block.joints:
                keeping.enter_context(_kept_hyperparameters(joint.optimizers))
            block.take_part_until_all_have_left()
    except BaseException as error:
        block.abandon(error)
        raise
    finally:
        block.mark(is_joining=False, has_left=False)
        _around.reset(token)


@contextmanager
def _kept_hyperparameters(optimizers: OptimizerGroups) -> Iterator[None]:
    """Puts the hyperparameters of groups back at the end, as objects."""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizers.hyperparameters]
    try:
        yield
    finally:
        for group, values in zip(optimizers.hyperparameters, kept, strict=False):
            group.update(values)
