"""What explanations consist of: the times of buckets and devices, each figure defined."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.runtime.profiling.recorder import RecordedStep


@dataclass(frozen=True, kw_only=True)
class FlightTimes:
    """When a bucket was where, and what waiting for it cost. Times count from the step's beginning; means over typical steps.

    Attributes:
        ready_ms: the last call had ended that makes what is launched (the region with the last gradient, say).
        launched_ms: the launch had returned.
        waited_ms: the wait began.
        finished_ms: the wait ended; later than the bytes were there, if it began later.
        hidden_ms: from the launch to the beginning of the wait: in flight while the device did something else. It is 0 on
            links that move nothing before the wait, such as shared-memory and copy: nothing is hidden there.
        exposed_ms: inside the wait; the sum of the next two.
        skew_ms: the part of it until the last device that is needed had launched: waiting for the slowest.
        transfer_ms: the rest: moving, adding and multiplying factors, which the waiting device does itself on shared-memory and
            copy.
    """

    ready_ms: float
    launched_ms: float
    waited_ms: float
    finished_ms: float
    hidden_ms: float
    skew_ms: float
    transfer_ms: float

    @property
    def exposed_ms(self) -> float:
        return self.skew_ms + self.transfer_ms


@dataclass(frozen=True, kw_only=True)
class DeviceFlight(FlightTimes):
    """A bucket's times on one device. One that only sends waits for nothing: it has finished when it has launched."""

    device: str


@dataclass(frozen=True, kw_only=True)
class BucketTimes(FlightTimes):
    """A bucket's times over all devices, made for each step before the mean over steps is taken.

    ``ready_ms``, ``launched_ms``, ``waited_ms`` and ``finished_ms`` are those of the last device.
    ``hidden_ms``, ``skew_ms`` and ``transfer_ms`` are means over all devices of the program; one that takes no part, or
    does not wait, counts 0. If a bucket is not communicated, all times are when it was ready, and durations are 0.

    Attributes:
        index: the bucket's number. A bucket that is reduced and then sent is there twice.
        num_bytes: its size.
        kind: its collective: reduce_scatter, all_reduce, broadcast, send (and recv); ``none`` if there is none.
        link: what carries it; empty if there is none.
        behind: what it waited behind: a late device and the call that this was in while others waited (``cpu:1's bwd_0``),
            or another wait that came before its own (``wait b2``); empty if for neither as much as 1% of the step.
        devices: the same for each device that takes part.
    """

    index: int
    num_bytes: int
    kind: str
    link: str
    behind: str
    devices: tuple[DeviceFlight, ...]


@dataclass(frozen=True)
class DeviceTimes:
    """What a device did in a step; means over typical steps.

    Attributes:
        device: its name.
        started_ms: when its function began: the thread was awake and had its shard.
        compute_ms: in regions.
        exposed_ms: in waits.
        update_ms: in the optimizer and in writing variables.
        finished_ms: when its last call had ended.
        region_ms: in each region, by name.
        parts_ms: the whole step, by `mirrorc.runtime.profiling.accounting.PARTS`.
    """

    device: str
    started_ms: float
    compute_ms: float
    exposed_ms: float
    update_ms: float
    finished_ms: float
    region_ms: Mapping[str, float]
    parts_ms: Mapping[str, float]


def median(values: Iterable[float]) -> float:
    """The middle one of some values, or the mean of the two in the middle."""
    return float(statistics.median(values))


def mean_over_devices(steps: Sequence[RecordedStep], num_devices: int, counts: Callable[[fx.Node], bool]) -> float:
    """Milliseconds in the calls that count, of a device on average; mean over steps."""
    calls = [[call for own in step.calls for call in own if counts(call.node)] for step in steps]
    return statistics.fmean(sum(call.duration_ns for call in own) / num_devices / 1e6 for own in calls)
