"""Buckets of gradients, and their slots."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mirrorc.ir.variables import Placement, UpdateRule


@dataclass(frozen=True)
class Slot:
    variable: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    num_elements: int


@dataclass(frozen=True)
class RowType:
    """A row of a gradient's factor; only the number of rows differs between workers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Detail:
    name: str
    value: int


@dataclass(frozen=True)
class SentFactors:
    operation: str
    rows: tuple[RowType, ...]
    details: tuple[Detail, ...] = ()

    def __str__(self) -> str:
        details = "".join(f", {detail.name}={detail.value}" for detail in self.details)
        return f"{self.operation} of {', '.join(map(str, self.rows))}{details}"


@dataclass(frozen=True)
class Elements:
    start: int
    stop: int


@dataclass(frozen=True)
class Pack:
    """Consecutive elements of a bucket, communicated by one collective. ``number`` counts packs over all buckets."""

    number: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Gradients updated together, and reduced together unless the bucket is cut into packs.

    Attributes:
        slots: disjoint, at aligned offsets.
        num_elements: with padding.
        sent_factors: by slot; empty if workers send sums.
        part: the elements that this worker updates; None if it updates all.
        owner: the only replica that updates the bucket, now or after a later pass.
        packs: empty if the bucket is one pack. A gradient may span several packs.
    """

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    num_elements: int
    rule: UpdateRule
    placement: Placement = Placement.MIRRORED
    sent_factors: tuple[SentFactors, ...] = ()
    gathers_factors: bool = False
    part: Elements | None = None
    owner: int | None = None
    packs: tuple[Pack, ...] = ()

    @property
    def launch_units(self) -> tuple[Pack, ...]:
        return self.packs or (Pack(self.index, 0, self.num_elements),)

    @property
    def is_cut(self) -> bool:
        return len(self.packs) > 1

    def slots_in(self, pack: Pack) -> list[Slot]:
        """Padding after a slot belongs to the slot."""
        ends = zip(self.slots, [*(slot.offset for slot in self.slots[1:]), self.num_elements], strict=True)
        return [slot for slot, end in ends if slot.offset < pack.stop and pack.start < end]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_sent_as_factors(self) -> bool:
        return bool(self.sent_factors)

    @property
    def is_gathered(self) -> bool:
        return self.gathers_factors or self.rule.takes_rows

    @functools.cached_property
    def slot_of(self) -> Mapping[str, Slot]:
        return {slot.variable: slot for slot in self.slots}

    def share(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The half-open range of elements that a replica reduces; may be empty."""
        return self.placement.value.share(self.num_elements, replica, num_replicas, self.owner)

    def updated(self, replica: int, num_replicas: int) -> tuple[int, int]:
        if self.part is None:
            return self.share(replica, num_replicas)
        start, stop = self.placement.value.share(self.part.stop - self.part.start, replica, num_replicas, self.owner)
        return self.part.start + start, self.part.start + stop

    def made(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements that a replica computes from factors. Replica 0 computes all of a gradient left to the user."""
        if self.rule.leaves_whole_gradient:
            return (0, self.num_elements if replica == 0 else 0)
        return (self.updated if self.is_sent_as_factors else self.share)(replica, num_replicas)

    def owner_of_parameters(self, replica: int) -> int:
        return self.placement.value.owner(replica)

    def is_updated_by(self, replica: int, num_replicas: int) -> bool:
        if self.has_owner or not self.updates_by_shares:
            return self.owner_of_parameters(replica) == replica
        start, stop = self.updated(replica, num_replicas)
        return start < stop

    @property
    def has_owner(self) -> bool:
        return self.placement.value.has_owner

    @property
    def updates_by_shares(self) -> bool:
        """An optimizer that needs the whole gradient cannot update by shares, but one owner can."""
        return self.placement.value.updates_by_shares and (self.rule.elementwise or self.has_owner)

    @property
    def reduces_by_shares(self) -> bool:
        """False for a cut bucket, because a share must be consecutive."""
        return self.updates_by_shares and not self.is_cut

    @property
    def is_written_last(self) -> bool:
        return self.placement.value.is_written_last


def are_cut(buckets: Sequence[Bucket]) -> bool:
    return any(bucket.packs for bucket in buckets)
