"""The figures of explanations: the times of buckets and devices, each defined."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.runtime.profiling.recorder import RecordedStep


@dataclass(frozen=True, kw_only=True)
class FlightTimes:
    """The times of a bucket's communication. Moments count from the beginning of the step; all are means over typical steps.

    Attributes:
        ready_ms: the end of the last call that makes the launched value, such as the region with the last gradient.
        launched_ms: the end of the launch.
        waited_ms: the beginning of the wait.
        finished_ms: the end of the wait. If the wait began late, the bytes may have arrived before it.
        hidden_ms: the time from the launch to the beginning of the wait, in which the bucket is in flight while the device
            does something else. It is 0 on links that move nothing before the wait, such as shared-memory and copy.
        exposed_ms: the time in the wait, which is the sum of the next two.
        skew_ms: the part of the wait before the launch of the last device that is needed: waiting for the slowest device.
        transfer_ms: the rest of the wait: moving, adding and multiplying factors. On shared-memory and copy, the waiting
            device does this itself.
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
    """A bucket's times on one device. A device that only sends waits for nothing, and has finished when it has launched."""

    device: str


@dataclass(frozen=True, kw_only=True)
class BucketTimes(FlightTimes):
    """A bucket's times over all devices. They are computed for each step, and then averaged over the steps.

    ``ready_ms``, ``launched_ms``, ``waited_ms`` and ``finished_ms`` are means over the devices that take part.
    ``hidden_ms``, ``skew_ms`` and ``transfer_ms`` are means over all devices of the program; a device that takes no part,
    or does not wait, counts as 0. If every device takes part, ``finished_ms - waited_ms`` is ``exposed_ms``. If a bucket is
    not communicated, all moments are ``ready_ms``, and all durations are 0.

    Attributes:
        index: the bucket's number. A bucket that is reduced and then sent is listed twice.
        num_bytes: the size of what is moved: of the bucket (in the dtype in which workers send it), of the part of it that
            is sent, or of the factors of all devices.
        kind: its collective: reduce_scatter, all_reduce, reduce, broadcast, send (and recv); ``none`` if there is none.
        link: the link that carries it; empty if there is none.
        behind: the cause of the longest waiting: the call of a late device while others waited for it (``cpu:1's bwd_0``),
            or an earlier wait (``wait b2``); empty if neither took 1% of the step.
        devices: the times on each device that takes part.
        chunk, round: those of a send; None if it names none.
        pack: the pack of the bucket, if that is cut into packs; otherwise None.
        uncompressed_bytes: what would be moved without compression; None if nothing is compressed.
    """

    index: int
    num_bytes: int
    kind: str
    link: str
    behind: str
    devices: tuple[DeviceFlight, ...]
    chunk: int | None
    round: int | None
    pack: int | None = None
    uncompressed_bytes: int | None = None

    @property
    def label(self) -> str:
        """The bucket, with its pack if it is cut, and the chunk and the round of a send that names them: ``b1 p3 c0 r2``."""
        parts = (("b", self.index), ("p", self.pack), ("c", self.chunk), ("r", self.round))
        return " ".join(f"{letter}{number}" for letter, number in parts if number is not None)


@dataclass(frozen=True)
class DeviceTimes:
    """The times of a device in a step; means over typical steps.

    Attributes:
        device: the device's name.
        started_ms: the moment at which its function began: the thread was awake and had its shard.
        compute_ms: the time in regions.
        exposed_ms: the time in waits.
        update_ms: the time in the optimizer and in writing variables.
        finished_ms: the moment at which its last call ended.
        region_ms: the time in each region, by name.
        parts_ms: the parts of the whole step, see `mirrorc.runtime.profiling.accounting.PARTS`.
    """

    device: str
    started_ms: float
    compute_ms: float
    exposed_ms: float
    update_ms: float
    finished_ms: float
    region_ms: Mapping[str, float]
    parts_ms: Mapping[str, float]


def mean_over_devices(steps: Sequence[RecordedStep], num_devices: int, counts: Callable[[fx.Node], bool]) -> float:
    calls = [[call for device_calls in step.calls for call in device_calls if counts(call.node)] for step in steps]
    return statistics.fmean(
        sum(call.duration_ns for call in device_calls) / num_devices / 1e6 for device_calls in calls
    )
