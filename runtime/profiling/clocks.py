"""Clocks with which devices mark the ends of their calls."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.ir.devices import Device

NUM_KEPT_STEPS = 32  # the last ones, failed ones among them


class Clock:
    """Marks the ends of a device's calls; the device's generated function uses it in the device's thread.

    This class uses the host's clock, for devices whose work is done when a call returns. Its marks are seconds as floats, which
    Python makes and frees faster than integers; with integers, a mark took twice as long.

    Attributes:
        begin, mark: return a mark of the present moment: of the beginning of a step, and of the end of a call.
        note: takes the marks of a finished step: of its beginning, and of the end of each call.
    """

    begin: Callable[[], Any] = staticmethod(time.perf_counter)  # without a frame of Python's
    mark: Callable[[], Any] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._noted: deque[tuple[Any, ...]] = deque(maxlen=NUM_KEPT_STEPS)
        self.note = self._noted.append

    def clear(self) -> None:
        """Forgets the marks of all steps."""
        self._noted.clear()

    def noted(self) -> list[tuple[Any, ...]]:
        """The marks of the last steps, a tuple for each."""
        return list(self._noted.copy())  # an atomic copy: the device's thread cannot append meanwhile

    def begun_seconds(self, marks: Sequence[Any]) -> float:
        """When the step of these marks began, on the host's clock."""
        return float(marks[0])

    def times_ns(self, marks: Sequence[Any]) -> list[int]:
        """The marks of a step, in nanoseconds of the host's clock."""
        return [nanoseconds(mark) for mark in marks]


def nanoseconds(seconds: float) -> int:
    """A moment or a time in whole nanoseconds."""
    return round(seconds * 1e9)


class EventClock(Clock):
    """Marks the ends of calls of a GPU, which return when work is queued: a mark is an event on the thread's current stream.

    Times are computed from events only when they are read, by the time that has passed since the step's first event. The first
    event is assumed to occur when it is recorded. If the GPU lags behind its thread at that moment, all times of the step are
    too early by this lag. This has not run on a GPU yet; it is tested with a substitute for `torch.cuda.Event`.

    Args:
        make_event: returns a new event that measures time; by default a CUDA event.
        now: the host's clock, in seconds.
    """

    def __init__(
        self, make_event: Callable[[], Any] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self._make_event, self._now = make_event or functools.partial(torch.cuda.Event, enable_timing=True), now

    def begin(self) -> Any:
        """As in `Clock`; with the host's time beside the event."""
        return self._now(), self.mark()

    def mark(self) -> Any:
        """As in `Clock`."""
        event = self._make_event()
        event.record()
        return event

    def begun_seconds(self, marks: Sequence[Any]) -> float:
        """As in `Clock`."""
        return float(marks[0][0])

    def times_ns(self, marks: Sequence[Any]) -> list[int]:
        """As in `Clock`; waits until the GPU has reached the last mark."""
        (begun_seconds, first), *rest = marks
        (rest[-1] if rest else first).synchronize()
        milliseconds = [0.0, *(first.elapsed_time(event) for event in rest)]
        return [nanoseconds(begun_seconds) + round(ms * 1e6) for ms in milliseconds]


def clock_for(device: Device) -> Clock:
    """The clock that tells when a device's work is done."""
    return EventClock() if device.is_asynchronous else Clock()
