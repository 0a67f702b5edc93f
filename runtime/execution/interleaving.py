"""Lets the replicas of a small step take turns in the caller's thread, where waking theirs takes longer than computing."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from typing import Any

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.runtime.communication import Aborted

LONGEST_SECONDS = 1e-3  # of a step that is tried in turns: a longer one computes more than the threads cost
_NUM_UNCOUNTED, _NUM_TRIED = 3, 9  # steps in either way: those after a change, and those that are compared
NUM_TRIAL_STEPS = 2 * (_NUM_UNCOUNTED + _NUM_TRIED)
"""After so many steps it is decided which way stays."""

Turns = Generator[None, None, Any]
"""A replica's step, which pauses before each of its waits and returns a result."""


def can_take_turns(program: Program) -> bool:
    """Whether replicas that pause before their waits, and go on when all others have come as far, wait for nobody.

    So it is if all wait for the same things in the same order, and for nothing but that others have launched.
    """
    if len(program.devices) == 1 or any(device.torch_device.type != "cpu" for device in program.devices):
        return False
    waits = [list(calls_to(module.graph, ops.wait)) for module in program.device_graphs.values()]
    launches: list[Any] = [wait.args[0] for own in waits for wait in own]
    is_meeting = all(
        launch.target is ops.reduce_scatter and launch.kwargs["link"] == "shared-memory" for launch in launches
    )
    return is_meeting and len({tuple(map(bucket_of, own)) for own in waits}) == 1


def take_turns(replicas: Sequence[Turns]) -> list[tuple[bool, Any]]:
    """Runs steps round by round. For each, whether it succeeded, and its result or exception; one failure ends all.

    An interrupt ends all as well, and is raised.
    """
    results: list[tuple[bool, Any]] = [(False, Aborted())] * len(replicas)
    left = dict(enumerate(replicas))
    while left:
        for replica, steps in list(left.items()):
            try:
                next(steps)
            except StopIteration as end:
                results[replica] = (True, end.value)
                del left[replica]
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                results[replica] = (False, error)
                for other in left.values():
                    other.close()
                return [result if not result[0] else (False, Aborted()) for result in results]
    return results


class Pace:
    """Finds out which way is faster: some steps by threads and, if these are short, some in turns; then that it is.

    The numbers that a step gives are the same either way.
    """

    def __init__(self, can_take_turns: bool) -> None:
        self.in_turns = False
        self.is_decided = not can_take_turns
        self._seconds: list[float] = []
        self._by_threads = 0.0

    def note(self, seconds: float) -> None:
        """Told how long a step took, in the way that ``in_turns`` says."""
        if self.is_decided:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < _NUM_UNCOUNTED + _NUM_TRIED:
            return
        typical = statistics.median(self._seconds[_NUM_UNCOUNTED:])
        self._seconds.clear()
        if self.in_turns:
            self.in_turns, self.is_decided = typical < self._by_threads, True
        elif typical < LONGEST_SECONDS:
            self.in_turns, self._by_threads = True, typical
        else:
            self.is_decided = True
