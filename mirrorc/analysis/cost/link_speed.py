"""The link between workers: its speed, and the messages of collectives in a ring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """The messages that a worker sends in a collective, one after the other.

    Attributes:
        number: of messages.
        num_bytes: of all of them.
    """

    number: int
    num_bytes: float


def ring_all_reduce(num_bytes: float, num_workers: int) -> Messages:
    """The messages of a sum over workers: 2 (W - 1), each of a W-th of the bytes."""
    return Messages(2 * (num_workers - 1), 2 * (num_workers - 1) * num_bytes / num_workers)


def ring_all_gather(num_bytes: float, num_workers: int) -> Messages:
    """The messages by which each worker gets the bytes of all: W - 1, each with those of one worker."""
    return Messages(num_workers - 1, (num_workers - 1) * num_bytes)


def ring_all_to_all(num_bytes: float, num_workers: int) -> Messages:
    """The messages by which each worker gets its part of the bytes of all: W - 1, each of a W-th of the bytes."""
    return Messages(num_workers - 1, (num_workers - 1) * num_bytes / num_workers)


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a link between workers, as one of them has measured it.

    Attributes:
        latency_seconds: of a message without content, from a worker to the next one (alpha).
        seconds_per_byte: the additional time for each byte that a worker sends (beta).
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds_of(self, messages: Messages) -> float:
        """The time of a collective."""
        return messages.number * self.latency_seconds + messages.num_bytes * self.seconds_per_byte

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
    per_byte = ring_all_reduce(1, num_workers)
    slope = (large[1] - small[1]) / (per_byte.num_bytes * (large[0] - small[0]))
    if slope <= 0:  # noise is larger than what bytes cost
        slope = large[1] / (per_byte.num_bytes * large[0])
    return LinkSpeed(max(0.0, empty_seconds) / per_byte.number, slope)
