"""Clocks that devices mark the ends of their calls with."""

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
    """What a device's generated function marks the ends of its calls with, in that device's thread.

    This one is the host's, for devices whose work is done when a call returns. Its marks are seconds as floats, which Python
    makes and frees with less ado than integers: of all that a mark costs, that was half.

    Attributes:
        begin, mark: give a mark of the moment at which a step begins, and of any other.
        note: takes the marks of a step that the device has finished: of its beginning, and of the end of each call.
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
        return list(self._noted.copy())  # in one go: the device's thread cannot append meanwhile

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
    """For GPUs, whose calls return when work is queued: a mark is an event on the thread's current stream.

    Events become times when somebody asks, by their distance from the step's first event, which is taken to have happened
    when it was recorded: a GPU that lags behind its thread there is shown too early by that lag. This has not run on a GPU
    yet; it is tested with a stand-in for `torch.cuda.Event`.

    Args:
        make_event: gives a new event that measures time; by default one of CUDA's.
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
        """As in `Clock`; waits until the GPU has come to the last of them."""
        (begun_seconds, first), *rest = marks
        (rest[-1] if rest else first).synchronize()
        milliseconds = [0.0, *(first.elapsed_time(event) for event in rest)]
        return [nanoseconds(begun_seconds) + round(ms * 1e6) for ms in milliseconds]


def clock_for(device: Device) -> Clock:
    """The clock that tells when a device's work is done."""
    return EventClock() if device.is_asynchronous else Clock()
