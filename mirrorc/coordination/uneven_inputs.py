"""The context of `mirrorc.join`, for loops that end earlier on some workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from mirrorc.coordination.team_coordinator import TeamCoordinator, current_block, refuse_within_others
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.user.optimizer_groups import OptimizerGroups


@dataclasses.dataclass(frozen=True)
class JoinedStep:
    """``take_part`` takes part in a call of the other workers; False if there was none."""

    coordinator: TeamCoordinator
    take_part: Callable[[], bool]
    exclusively: Callable[[Callable[[], Any]], Any]
    is_closed: Callable[[], bool]


@contextmanager
def until_all_have_left(steps: Sequence[JoinedStep]) -> Iterator[None]:
    """A context for a loop. At its end, this worker takes part in calls of others until all loops have ended.

    An exception in the context ends the next call of the other workers. Without ``steps`` it does nothing.
    """
    if not steps:
        yield
        return
    coordinators = [step.coordinator for step in steps]
    for coordinator in coordinators:
        if coordinator.is_in_block:
            why = "one block around the loop is enough"
            fix = "leave the inner step.join() out"
            raise problem(ExecutionError, "MC6302: step.join() was entered inside of step.join()", why, fix)
        refuse_within_others(coordinator, "step.join() was entered")
    for number, coordinator in enumerate(coordinators):
        coordinator.enter_block(functools.partial(_take_turn, steps, number))
    token = current_block.set(coordinators)
    try:
        yield
        for coordinator in coordinators:
            coordinator.leave_loop()
        with ExitStack() as restoring:
            for coordinator in coordinators:
                restoring.enter_context(_restored_hyperparameters(coordinator.optimizers))
            _take_part_until_all_have_left(steps)
    except BaseException as error:
        for coordinator in coordinators:
            coordinator.abandon(error)
        raise
    finally:
        for coordinator in coordinators:
            coordinator.exit_block()
        current_block.reset(token)


def _take_turn(steps: Sequence[JoinedStep], number: int) -> int | None:
    """The step to call, agreed on over the first step, as workers that have left do not know it; None if all have left."""
    if len(steps) == 1:
        return 0
    first = steps[0]
    agreed: Agreement = first.exclusively(lambda: first.coordinator.take_turn(number))
    return None if agreed.is_over else agreed.turn


def _take_part_until_all_have_left(steps: Sequence[JoinedStep]) -> None:
    while not steps[0].is_closed():
        number = _take_turn(steps, 0)
        if number is None or not steps[number].take_part():
            return


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
