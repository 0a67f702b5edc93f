"""Records when every device of a step made its calls, and keeps the last steps."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.errors import ExecutionError
from mirrorc.runtime.profiling.clocks import NUM_KEPT_STEPS, Clock, nanoseconds


@dataclass(frozen=True)
class Call:
    """A call that a device made, from the end of the one before it to its own; what was freed in between counts with it."""

    node: fx.Node
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class RecordedStep:
    """A step that all devices finished, in nanoseconds of the host's clock.

    Attributes:
        warms_up: whether it is the first that was ever recorded of its program.
        begun_ns: when the caller began to hand it to the devices.
        started_ns: for each device, when its function began.
        calls: for each device, its calls in order, the first from `started_ns` on; their nodes are of its graph.
    """

    warms_up: bool
    begun_ns: int
    started_ns: tuple[int, ...]
    calls: tuple[tuple[Call, ...], ...]

    @property
    def ended_ns(self) -> int:
        """When the last device was done."""
        return max([*self.started_ns, *(own[-1].end_ns for own in self.calls if own)])

    @functools.cached_property
    def call_of(self) -> Mapping[fx.Node, Call]:
        """The call of each node, of all devices."""
        return {call.node: call for own in self.calls for call in own}


class Recorder:
    """Keeps the marks of the last steps of one executor. Steps come one after the other; anyone may look at any time.

    A step costs little, as nothing is put together in it: each device notes its marks, and to which step these belong
    follows from when they begin. A step that some device did not finish lacks that device's.

    Args:
        clocks: of the devices, in order of replicas.
        now: the host's clock, in seconds, the same as that of the devices' clocks.

    Attributes:
        nodes: for each device, the nodes whose calls it marks, in order; the same for all steps.
    """

    def __init__(self, clocks: Sequence[Clock], now: Callable[[], float] = time.perf_counter) -> None:
        self.clocks = clocks
        self.nodes: Sequence[Sequence[fx.Node]] = ()
        self._now = now
        self._begun: deque[float] = deque(maxlen=NUM_KEPT_STEPS + 1)  # one more, which tells that any was dropped
        self._failed: deque[float] = deque(maxlen=2 * NUM_KEPT_STEPS)  # a failure may be told of twice

    @property
    def has_begun(self) -> bool:
        """Whether any step ever began."""
        return bool(self._begun)

    def begin(self) -> None:
        """The caller begins a step."""
        self._begun.append(self._now())

    def clear(self) -> None:
        """Forgets all steps; while none runs."""
        self._begun.clear()
        for clock in self.clocks:
            clock.clear()

    def forget(self) -> None:
        """The step that began last has failed, or was interrupted, though some devices may finish it."""
        self._failed.append(self._begun[-1])

    def steps(self) -> tuple[RecordedStep, ...]:
        """The kept steps that all devices have finished, oldest first."""
        noted = [clock.noted() for clock in self.clocks]  # first, so that every step among them is among the begun
        begun, failed = list(self._begun.copy()), set(self._failed.copy())
        marks: dict[float, dict[int, Sequence[Any]]] = {moment: {} for moment in begun}
        for replica, (clock, own) in enumerate(zip(self.clocks, noted, strict=True)):
            for step in own:
                if place := bisect.bisect(begun, clock.begun_seconds(step)):  # none for one that was dropped
                    marks[begun[place - 1]][replica] = step
        has_dropped = len(begun) > NUM_KEPT_STEPS
        begun = [m for m in begun[-NUM_KEPT_STEPS:] if m not in failed and len(marks[m]) == len(noted)]
        return tuple(
            self._resolve(i == 0 and not has_dropped, moment, [marks[moment][r] for r in range(len(noted))])
            for i, moment in enumerate(begun)
        )

    def _resolve(self, warms_up: bool, begun: float, marks: Sequence[Sequence[Any]]) -> RecordedStep:
        times = [clock.times_ns(own) for clock, own in zip(self.clocks, marks, strict=True)]
        calls = [
            tuple(Call(node, *span) for node, span in zip(nodes, itertools.pairwise(own), strict=True))
            for nodes, own in zip(self.nodes, times, strict=True)
        ]
        return RecordedStep(warms_up, nanoseconds(begun), tuple(own[0] for own in times), tuple(calls))


def recorded_steps(is_recording: bool, recorder: Recorder | None) -> tuple[RecordedStep, ...]:
    """The recorded steps of the program that was called last, if any was.

    Raises:
        ExecutionError: there are none; says why, and what to do.
    """
    if not is_recording:
        raise ExecutionError("no step was recorded: this one was compiled with record=False; compile with record=True")
    steps = recorder.steps() if recorder is not None else ()
    if recorder is not None and recorder.has_begun and not steps:
        raise ExecutionError(
            "no step was recorded: each that began with the program of the last call failed or was interrupted; call the "
            "step with a batch on which it succeeds"
        )
    if not steps:
        raise ExecutionError(
            "no step was recorded: none has run yet with the program that was compiled last; call the step with a batch first"
        )
    return steps
