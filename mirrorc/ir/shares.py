"""Shares of 1-D memory: consecutive elements, one share for each device."""

from __future__ import annotations

SHARE_ELEMENTS = 64
"""Shares begin at multiples of this, so that two devices never write to the same cache line."""


def share_bounds(num_elements: int, num_shares: int, index: int) -> tuple[int, int]:
    """A share of 1-D memory: its first element, and one past its last. Shares are disjoint, in order, and cover it all."""
    units = -(-num_elements // SHARE_ELEMENTS)
    start, stop = (min(num_elements, units * i // num_shares * SHARE_ELEMENTS) for i in (index, index + 1))
    return start, stop
