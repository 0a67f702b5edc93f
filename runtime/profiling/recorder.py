"""Clocks for the ends of calls, and the records of every device's steps."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.runtime.devices.events import has_happened, made_current

NUM_RECORDED_STEPS = 32  # the last ones, failed ones among them
_SECONDS_OF_AN_ANCHOR = 8.0  # within this time, 32 bits tell milliseconds between events to a microsecond


class Clock:
    """Marks the ends of a device's calls, by the CPU's clock. Marks are floats, which are faster than integers.

    Attributes:
        begin, mark: return marks of the step's beginning and of a call's end.
        note: takes the marks of a finished step.
    """

    begin: Callable[[], Any] = staticmethod(time.perf_counter)  # without a frame of Python's
    mark: Callable[[], Any] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._noted: deque[Sequence[Any]] = deque(maxlen=NUM_RECORDED_STEPS)
        self.note = self._noted.append

    def clear(self) -> None:
        self._noted.clear()

    def noted(self) -> list[Sequence[Any]]:
        return list(self._noted.copy())  # an atomic copy: the device's thread cannot append meanwhile

    def begun_seconds(self, marks: Sequence[Any]) -> float:
        return float(marks[0])

    def times_ns(self, marks: Sequence[Any]) -> list[int]:
        return [nanoseconds(mark) for mark in marks]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class EventClock(Clock):
    """Marks the ends of a GPU's calls with events on the current stream, read lazily and reused.

    The CPU waits for an additional event, the anchor, to relate the two clocks. Anchors are renewed after a few
    seconds, because the time between two events is a 32-bit number.
    """

    def __init__(
        self,
        device: torch.device | None,
        timeout_seconds: float,
        make_event: Callable[[], Any] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._device, self._timeout_seconds = device, timeout_seconds
        self._make_event, self._now = make_event or functools.partial(torch.cuda.Event, enable_timing=True), now
        self._free: deque[Any] = deque()
        self._anchor: tuple[float, Any] | None = None  # when it happened, on the host's clock, and the event
        self.note = self._note

    def _note(self, marks: Sequence[Any]) -> None:
        self._noted.append(_EventMarks(marks, self._free))

    def begin(self) -> Any:
        return self._now(), self.mark()

    def mark(self) -> Any:
        event = self._free.popleft() if self._free else self._make_event()  # only this thread takes events out
        event.record()
        return event

    def begun_seconds(self, marks: Sequence[Any]) -> float:
        return float(marks[0][0])

    def times_ns(self, marks: Sequence[Any]) -> list[int]:
        (begun_seconds, first), *rest = marks
        self._await(rest[-1] if rest else first)
        first_ns = self._happened_ns(begun_seconds, first)
        return [first_ns, *(first_ns + round(first.elapsed_time(event) * 1e6) for event in rest)]

    def _happened_ns(self, recorded_seconds: float, event: Any) -> int:
        if self._anchor is None or abs(recorded_seconds - self._anchor[0]) > _SECONDS_OF_AN_ANCHOR:
            with made_current(self._device):
                anchor = self._make_event()
                anchor.record()
            self._await(anchor)
            self._anchor = self._now(), anchor
        seconds, anchor = self._anchor
        is_later = recorded_seconds > seconds
        distance_ms = anchor.elapsed_time(event) if is_later else -event.elapsed_time(anchor)
        return max(nanoseconds(recorded_seconds), nanoseconds(seconds) + round(distance_ms * 1e6))

    def _await(self, event: Any) -> None:
        if not has_happened(event, self._timeout_seconds):
            raise problem(
                ExecutionError,
                f"MC5007: {self._device} has not done what was queued on it within {self._timeout_seconds:g} s",
                "a kernel hangs, or waits for another GPU, and the times of its last steps are not known",
                "close() the step or module, and compile anew",
            )


class _EventMarks(list[Any]):
    """Marks whose events are reused when the list is freed."""

    def __init__(self, marks: Sequence[Any], free: deque[Any]) -> None:
        super().__init__(marks)
        self._free = free

    def __del__(self) -> None:
        (_, first), *rest = self
        self._free.extend((first, *rest))


def clock_for(device: Device, timeout_seconds: float) -> Clock:
    return EventClock(device.torch_device, timeout_seconds) if device.is_asynchronous else Clock()


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
        return RecordedStep(warms_up, nanoseconds(begun), tuple(started for started, *_ in times), tuple(calls))


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
