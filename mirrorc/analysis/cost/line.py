"""The time of calls as a straight line over their bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """The time of calls of one kind: some for each call, and some for each byte."""

    seconds: float = 0.0
    seconds_per_byte: float = 0.0

    @classmethod
    def through(
        cls, points: Sequence[tuple[float, float]], *, nominal: float | None = None, telling_bytes: float = 0.0
    ) -> Line:
        """The line that is nearest to some sizes in bytes and times in seconds; neither of its figures is negative.

        Sizes that are alike tell nothing of the time for a byte: those within a factor of two, or within ``telling_bytes``.

        Args:
            points: sizes and times.
            nominal: the seconds for a byte where sizes are alike, but no more than any call takes; None if calls of such sizes
                take time in proportion to their bytes.
            telling_bytes: the smallest difference of sizes that counts.
        """
        if not points:
            return cls()
        sizes = [size for size, _ in points]
        size, time = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
        spread = math.fsum((x - size) ** 2 for x in sizes)
        if max(sizes) < 2 * min(sizes) or max(sizes) - min(sizes) < telling_bytes or not spread:
            if nominal is None:
                return cls(0.0, time / size) if size else cls(time)
            slope = min([nominal, *(y / x for x, y in points if x)])
            return cls(statistics.median(y - slope * x for x, y in points), slope)
        slope = max(0.0, math.fsum((x - size) * (y - time) for x, y in points) / spread)
        if slope * size > time:
            return cls(0.0, time / size)
        return cls(time - slope * size, slope)

    def at(self, num_bytes: float) -> float:
        """The seconds of a call."""
        return self.seconds + num_bytes * self.seconds_per_byte
