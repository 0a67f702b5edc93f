"""Clocks for the ends of calls."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.runtime.devices.current import made_current
from mirrorc.runtime.devices.events import has_happened

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
