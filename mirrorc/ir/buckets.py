"""Buckets: gradients that are reduced and applied together, and the slots in which they lie."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mirrorc.ir.variables import Placement, UpdateRule

_SHARE_ELEMENTS = 64  # shares begin at multiples of this, so that two devices never write to the same cache line


def share_bounds(num_elements: int, num_shares: int, index: int) -> tuple[int, int]:
    """A share of 1-D memory: its first element, and one past its last. Shares are disjoint, in order, and cover it all."""
    units = -(-num_elements // _SHARE_ELEMENTS)
    start, stop = (min(num_elements, units * i // num_shares * _SHARE_ELEMENTS) for i in (index, index + 1))
    return start, stop


@dataclass(frozen=True)
class Slot:
    """A gradient's place in a bucket.

    Attributes:
        variable: name of the parameter whose gradient lies here.
        shape: its shape.
        strides: its strides, those of the parameter.
        offset: first element, counted in elements from the start of the bucket.
        num_elements: how many elements.
    """

    variable: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    num_elements: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced and applied together, in the order in which backward makes them.

    Attributes:
        index: its number; collectives carry it as their tag.
        dtype: the one dtype of all its gradients.
        slots: its gradients' places; slots are disjoint and begin at aligned offsets.
        num_elements: its length, padding included.
        rule: how its parameters are updated.
        placement: whether each replica has its own copy of the parameters, or all replicas share one copy, of which each
            replica updates a share.
    """

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    num_elements: int
    rule: UpdateRule
    placement: Placement = Placement.MIRRORED

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @functools.cached_property
    def slot_of(self) -> Mapping[str, Slot]:
        """The slots, by name of the variable."""
        return {slot.variable: slot for slot in self.slots}

    def share(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements that a replica updates: the first one, and one past the last one.

        A replica's share of a small shared bucket may be empty.
        """
        if self.placement is Placement.MIRRORED:
            return 0, self.num_elements
        return share_bounds(self.num_elements, num_replicas, replica)
