"""The times of buckets and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FlightTimes:
    """The times of a bucket's communication, as means over typical steps. Points in time count from the beginning of
    the step.

    Attributes:
        ready_ms: the end of the last call that computes the launched value.
        launched_ms: the end of the launch.
        waited_ms: the beginning of the wait.
        finished_ms: the end of the wait. The bytes may have arrived before a late wait.
        hidden_ms: from the launch to the wait; 0 on links without transfers before the wait, such as shared-memory.
        exposed_ms: the wait; the sum of skew and transfer.
        skew_ms: the wait until the last needed device launches.
        transfer_ms: the rest of the wait: moving, adding and multiplying factors.
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
    """A bucket's times on one device. If the device only sends, the end of the launch is its finish."""

    device: str


@dataclass(frozen=True, kw_only=True)
class BucketTimes(FlightTimes):
    """A bucket's times over all devices, averaged over the steps.

    Durations are means over all devices of the program. Points in time are means over participating devices. For a
    message, ``ready_ms`` and ``launched_ms`` are the sender's, ``waited_ms`` and ``finished_ms`` the receiver's, whose
    wait may begin before the launch. Without communication, all points in time are ``ready_ms``, and all durations 0.

    Attributes:
        label: bucket, pack, round, chunk and hop, if any: ``b1 p3 r2 c0 1→2``.
        index: the bucket's number. A bucket that is reduced and then sent is listed twice.
        num_bytes: moved bytes of the bucket or its part, in the sent dtype, or of all devices' factors.
        kind: the collective, ``send`` for a message, or ``none``.
        link: empty without communication.
        behind: the cause of the longest wait: a late device's call (``cpu:1's bwd_0``) or an earlier wait (``wait
            b2``); empty if it took less than 1% of the step.
        devices: the participating devices.
        pack: None if the bucket is not cut.
        round, chunk: for a message of an all-reduce; else None.
        source, destination: a message's replicas; None for collectives and sums of messages.
        uncompressed_bytes: None without compression.
    """

    label: str
    index: int
    num_bytes: int
    kind: str
    link: str
    behind: str
    devices: tuple[DeviceFlight, ...]
    pack: int | None = None
    round: int | None = None
    chunk: int | None = None
    source: int | None = None
    destination: int | None = None
    uncompressed_bytes: int | None = None


def by_kind_and_bucket(buckets: Iterable[BucketTimes]) -> list[list[BucketTimes]]:
    groups: dict[tuple[str, str, int], list[BucketTimes]] = {}
    for bucket in buckets:
        groups.setdefault((bucket.kind, bucket.link, bucket.index), []).append(bucket)
    return [*groups.values()]


def added_up(parts: Sequence[BucketTimes]) -> BucketTimes:
    """All parts of a bucket's communication of one kind, with sums of their bytes and durations."""
    first = parts[0]
    if len(parts) == 1:
        return first
    whole = [part.uncompressed_bytes for part in parts if part.uncompressed_bytes is not None]
    return BucketTimes(
        label=f"b{first.index}",
        index=first.index,
        num_bytes=sum(part.num_bytes for part in parts),
        kind=first.kind,
        link=first.link,
        behind=max(parts, key=lambda part: (bool(part.behind), part.exposed_ms)).behind,
        devices=(),
        uncompressed_bytes=sum(whole) if whole else None,
        finished_ms=max(part.finished_ms for part in parts),
        **{name: min(getattr(part, name) for part in parts) for name in ("ready_ms", "launched_ms", "waited_ms")},
        **{name: sum(getattr(part, name) for part in parts) for name in ("hidden_ms", "skew_ms", "transfer_ms")},
    )


@dataclass(frozen=True)
class DeviceTimes:
    """A device's times, as means over typical steps.

    Attributes:
        started_ms: the point at which the thread runs and has its shard.
        compute_ms: in regions.
        exposed_ms: in waits.
        update_ms: in the optimizer and in writing variables.
        finished_ms: the end of its last call.
        region_ms: by region name.
        parts_ms: see `mirrorc.runtime.profiling.accounting.PARTS`.
    """

    device: str
    started_ms: float
    compute_ms: float
    exposed_ms: float
    update_ms: float
    finished_ms: float
    region_ms: Mapping[str, float]
    parts_ms: Mapping[str, float]
