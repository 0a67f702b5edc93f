"""The speed of the link between workers, and the costs of ring collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """A worker's successive messages in a collective; ``num_bytes`` is their total."""

    number: int
    num_bytes: float


def ring_all_reduce(num_bytes: float, num_workers: int) -> Messages:
    """2 (W - 1) messages, each with 1 / W of the bytes."""
    return Messages(2 * (num_workers - 1), 2 * (num_workers - 1) * num_bytes / num_workers)


def ring_all_gather(num_bytes: float, num_workers: int) -> Messages:
    """W - 1 messages, each with the bytes of one worker."""
    return Messages(num_workers - 1, (num_workers - 1) * num_bytes)


def ring_all_to_all(num_bytes: float, num_workers: int) -> Messages:
    """W - 1 messages, each with 1 / W of the bytes."""
    return Messages(num_workers - 1, (num_workers - 1) * num_bytes / num_workers)


@dataclass(frozen=True)
class LinkSpeed:
    latency_seconds: float
    seconds_per_byte: float

    def seconds_of(self, messages: Messages) -> float:
        return messages.number * self.latency_seconds + messages.num_bytes * self.seconds_per_byte

    def __str__(self) -> str:
        rate = f"{1 / self.seconds_per_byte / 1e6:.0f} MB/s" if self.seconds_per_byte else "unlimited bandwidth"
        return f"{rate} and {self.latency_seconds * 1e3:.2f} ms for a message"


def fitted_speed(
    small: tuple[int, float], large: tuple[int, float], empty_seconds: float, num_workers: int
) -> LinkSpeed:
    """Fits a speed to all-reduces of two sizes (bytes, seconds) and an almost empty all-reduce.

    The time per byte is the slope between the two sizes, because rate limiters pass the first bytes of each at once.
    """
    per_byte = ring_all_reduce(1, num_workers)
    slope = (large[1] - small[1]) / (per_byte.num_bytes * (large[0] - small[0]))
    if slope <= 0:  # the noise exceeds the cost of bytes
        slope = large[1] / (per_byte.num_bytes * large[0])
    return LinkSpeed(max(0.0, empty_seconds) / per_byte.number, slope)
