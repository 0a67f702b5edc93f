"""A linear model of a call's time by its bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    seconds: float = 0.0
    seconds_per_byte: float = 0.0

    @classmethod
    def through(
        cls, points: Sequence[tuple[float, float]], *, nominal: float | None = None, telling_bytes: float = 0.0
    ) -> Line:
        """Fits a line to sizes in bytes and times in seconds, with non-negative coefficients.

        Args:
            nominal: the largest slope if sizes are too close for a fit; None then assumes no latency.
            telling_bytes: sizes are too close if they differ by fewer bytes, or by less than a factor of two.
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
        return self.seconds + num_bytes * self.seconds_per_byte
