"""How fast the link between workers is, and how long messages of some bytes take on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a link between workers, as one of them has measured it.

    Attributes:
        latency_seconds: of a message without content, from a worker to the next one.
        seconds_per_byte: how much longer it takes for each byte that a worker sends.
    """

    latency_seconds: float
    seconds_per_byte: float

    def all_reduce_seconds(self, num_bytes: float, num_workers: int) -> float:
        """How long a sum over workers takes in a ring: each sends 2 (W - 1) messages, each of a W-th of the bytes."""
        return 2 * (num_workers - 1) * (self.latency_seconds + num_bytes / num_workers * self.seconds_per_byte)

    def all_gather_seconds(self, num_bytes: float, num_workers: int) -> float:
        """How long it takes until each worker has the bytes of all, in a ring: W - 1 messages, each with those of one worker."""
        return (num_workers - 1) * (self.latency_seconds + num_bytes * self.seconds_per_byte)

    def all_to_all_seconds(self, num_bytes: float, num_workers: int) -> float:
        """How long it takes until each worker has its part of the bytes of all: each sends a W-th of its bytes to each other."""
        return (num_workers - 1) * (self.latency_seconds + num_bytes / num_workers * self.seconds_per_byte)

    def __str__(self) -> str:
        rate = f"{1 / self.seconds_per_byte / 1e6:.0f} MB/s" if self.seconds_per_byte else "unlimited bandwidth"
        return f"{rate} and {self.latency_seconds * 1e3:.2f} ms for a message"


def fitted_speed(
    small: tuple[int, float], large: tuple[int, float], empty_seconds: float, num_workers: int
) -> LinkSpeed:
    """The speed of a link on which sums over workers of two sizes, and one of nearly no bytes, took so long.

    The cost of a byte is the slope between the two: a link that lets some bytes pass at once, as a token bucket does, does so
    with both.

    Args:
        small, large: the bytes of a sum, and the seconds that it took.
        empty_seconds: those of a sum of a few bytes.
        num_workers: how many took part, at least two.
    """
    sent = 2 * (num_workers - 1) / num_workers
    slope = (large[1] - small[1]) / (sent * (large[0] - small[0]))
    if slope <= 0:  # noise is larger than what bytes cost
        slope = large[1] / (sent * large[0])
    return LinkSpeed(max(0.0, empty_seconds) / (2 * (num_workers - 1)), slope)
