"""Records the times of every device's calls."""

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
from mirrorc.messages.problem import problem
from mirrorc.runtime.profiling.clocks import NUM_RECORDED_STEPS, Clock, nanoseconds


@dataclass(frozen=True)
class Call:
    """A call. It starts at the end of the previous call, so it includes the freeing of values in between."""

    node: fx.Node
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class RecordedStep:
    """A step finished by all devices, in nanoseconds of the CPU's clock.

    Attributes:
        warms_up: it is the first recorded step of its program.
        begun_ns: the start of the first device by the caller.
        started_ns: by device, the start of its function.
        calls: by device; the first call starts at `started_ns`.
    """

    warms_up: bool
    begun_ns: int
    started_ns: tuple[int, ...]
    calls: tuple[tuple[Call, ...], ...]

    @property
    def ended_ns(self) -> int:
        return max([*self.started_ns, *(device_calls[-1].end_ns for device_calls in self.calls if device_calls)])

    @functools.cached_property
    def call_of(self) -> Mapping[fx.Node, Call]:
        return {call.node: call for device_calls in self.calls for call in device_calls}


class Recorder:
    """Stores the marks of an executor's last steps; they may be read at any time.

    `steps` assigns marks to steps by the beginnings of steps. ``nodes`` has the marked nodes of each device.
    """

    def __init__(self, clocks: Sequence[Clock], now: Callable[[], float] = time.perf_counter) -> None:
        self.clocks = clocks
        self.nodes: Sequence[Sequence[fx.Node]] = ()
        self._now = now
        self._begun: deque[float] = deque(maxlen=NUM_RECORDED_STEPS + 1)  # one more, to see whether any was dropped
        self._failed: deque[float] = deque(maxlen=2 * NUM_RECORDED_STEPS)  # a failure may be reported twice

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def begin(self) -> None:
        self._begun.append(self._now())

    def clear(self) -> None:
        """Must not be called while a step runs."""
        self._begun.clear()
        for clock in self.clocks:
            clock.clear()

    def forget(self) -> None:
        """Marks the last step as failed, although some devices may still finish it."""
        self._failed.append(self._begun[-1])

    def steps(self, most: int = NUM_RECORDED_STEPS) -> tuple[RecordedStep, ...]:
        noted = [clock.noted() for clock in self.clocks]  # read first, so that the beginning of each is known
        begun, failed = list(self._begun.copy()), set(self._failed.copy())
        marks: dict[float, dict[int, Sequence[Any]]] = {moment: {} for moment in begun}
        for replica, (clock, marks_of_steps) in enumerate(zip(self.clocks, noted, strict=True)):
            for step in marks_of_steps:
                if place := bisect.bisect(begun, clock.begun_seconds(step)):  # 0 for a step that was dropped
                    marks[begun[place - 1]][replica] = step
        has_dropped = len(begun) > NUM_RECORDED_STEPS
        begun = [m for m in begun[-NUM_RECORDED_STEPS:] if m not in failed and len(marks[m]) == len(noted)]
        return tuple(
            self._resolve(i == 0 and not has_dropped, moment, [marks[moment][r] for r in range(len(noted))])
            for i, moment in [*enumerate(begun)][-most:]
        )

    def _resolve(self, warms_up: bool, begun: float, marks: Sequence[Sequence[Any]]) -> RecordedStep:
        times = [clock.times_ns(device_marks) for clock, device_marks in zip(self.clocks, marks, strict=True)]
        calls = [
            tuple(Call(node, *span) for node, span in zip(nodes, itertools.pairwise(device_marks), strict=True))
            for nodes, device_marks in zip(self.nodes, times, strict=True)
        ]
        return RecordedStep(
            warms_up, nanoseconds(begun), tuple(device_marks[0] for device_marks in times), tuple(calls)
        )


def recorded_steps(recorder: Recorder | None, first_call: str = "step(x, y)") -> tuple[RecordedStep, ...]:
    """Raises `ExecutionError` if there are none; ``first_call`` makes one."""
    steps = recorder.steps() if recorder is not None else ()
    if recorder is not None and recorder.has_begun and not steps:
        raise problem(
            ExecutionError,
            "MC5005: no call was recorded",
            "each that began with this program failed or was interrupted",
            "make one call that succeeds, and ask again",
        )
    if not steps:
        raise problem(
            ExecutionError,
            "MC5005: no call was recorded, and a report needs one training call with this program",
            fix=first_call,
        )
    return steps
