"""The context of `mirrorc.join`, for loops that end earlier on some workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from mirrorc.cluster import Cluster
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.user.optimizer_groups import OptimizerGroups

_current_block: ContextVar[Block | None] = ContextVar("the block around the code of this thread", default=None)


class BlockCalls(Protocol):
    """The interface of a step over several workers for a block of `mirrorc.join`."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def optimizers(self) -> OptimizerGroups: ...

    @property
    def is_in_block(self) -> bool: ...

    def enter_block(self, before_call: Callable[[], object]) -> None:
        """``before_call`` runs before each call of the step until the block ends."""
        ...

    def leave_loop(self) -> None:
        """Marks this worker's loop as ended. The worker then takes part in calls of other workers."""
        ...

    def exit_block(self) -> None: ...

    def meet_turn(self, number: int) -> Agreement:
        """Exchanges headers before a call of the block's step ``number``."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Ends the next call of the other workers with this error."""
        ...


@dataclasses.dataclass(frozen=True)
class JoinedStep:
    """``take_part`` takes part in a call of the other workers; False if there was none."""

    calls: BlockCalls
    take_part: Callable[[], bool]
    exclusively: Callable[[Callable[[], Any]], Any]
    is_closed: Callable[[], bool]


class Block:
    """One worker's loop over some steps, followed by calls of workers whose loops still run.

    With several steps, all workers exchange headers before each call, over the connections of the first step: a worker
    whose loop has ended does not know the next step.
    """

    def __init__(self, steps: Sequence[JoinedStep]) -> None:
        self._steps = steps
        self.calls = [step.calls for step in steps]

    def enter(self) -> None:
        for number, calls in enumerate(self.calls):
            calls.enter_block(functools.partial(self._announce, number))

    def _announce(self, number: int) -> None:
        if len(self._steps) > 1:
            self._take_turn(number)

    def leave_loop(self) -> None:
        for calls in self.calls:
            calls.leave_loop()

    def exit(self) -> None:
        for calls in self.calls:
            calls.exit_block()

    def take_part_until_all_have_left(self) -> None:
        first = self._steps[0]
        while not first.is_closed():
            number = self._take_turn(0) if len(self._steps) > 1 else 0
            if number is None or not self._steps[number].take_part():
                return

    def _take_turn(self, number: int) -> int | None:
        first = self._steps[0]
        agreed: Agreement = first.exclusively(lambda: first.calls.meet_turn(number))
        return None if agreed.is_over else agreed.turn

    def abandon(self, error: BaseException) -> None:
        for calls in self.calls:
            calls.abandon(error)


def refuse_within_others(calls: BlockCalls, action: str) -> None:
    """Raises ExecutionError in a block of other steps, because some workers may have left it. ``action`` is a clause of
    the error.
    """
    block = _current_block.get()
    if block is not None and calls not in block.calls:
        why = "a worker that has left takes part in the calls of its step alone, and the two would wait for each other"
        fix = "with mirrorc.join(one_step, other_step): around the calls of both"
        raise problem(ExecutionError, f"MC6302: {action} inside of step.join() of another step", why, fix)


@contextmanager
def until_all_have_left(steps: Sequence[JoinedStep]) -> Iterator[None]:
    """A context for a loop. When its loop ends, a worker takes part in calls of other workers until all loops have
    ended.

    An exception in the context ends the next call of the other workers. Without ``steps``, the context does nothing.

    Raises:
        ExecutionError: the context is entered within another one.
    """
    if not steps:
        yield
        return
    block = Block(steps)
    for calls in block.calls:
        if calls.is_in_block:
            why = "one block around the loop is enough"
            fix = "leave the inner step.join() out"
            raise problem(ExecutionError, "MC6302: step.join() was entered inside of step.join()", why, fix)
        refuse_within_others(calls, "step.join() was entered")
    block.enter()
    token = _current_block.set(block)
    try:
        yield
        block.leave_loop()
        with ExitStack() as restoring:
            for calls in block.calls:
                restoring.enter_context(_restored_hyperparameters(calls.optimizers))
            block.take_part_until_all_have_left()
    except BaseException as error:
        block.abandon(error)
        raise
    finally:
        block.exit()
        _current_block.reset(token)


@contextmanager
def _restored_hyperparameters(optimizers: OptimizerGroups) -> Iterator[None]:
    """Restores the same objects in the groups, not copies."""
    groups = optimizers.hyperparameters
    before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    try:
        yield
    finally:
        for group, values in zip(optimizers.hyperparameters, before, strict=False):
            group.update(values)
