"""Which part of each gradient workers send, for ``compression=`` of `mirrorc.compile`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class TopK:
    """Each worker sends the largest elements of its sum of each bucket alone, and adds the rest to its sum in the next step.

    Attributes:
        ratio: how many elements of a bucket are sent, of all of them: more than 0, and at most 1. A bucket sends one at least.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, Real) or isinstance(self.ratio, bool):
            raise TypeError(f"ratio is {self.ratio!r}: give the part of all elements that is sent, such as 0.01")
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio is {self.ratio!r}: give the part of all elements that is sent, above 0 and at most 1"
            )

    def count(self, num_elements: int) -> int:
        """How many of so many elements are sent."""
        return min(num_elements, max(1, math.ceil(self.ratio * num_elements)))
