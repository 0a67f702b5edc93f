"""Buckets of gradients that are reduced and applied together, and their slots."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mirrorc.ir.variables import Placement, UpdateRule


@dataclass(frozen=True)
class Slot:
    """A gradient's place in a bucket, counted in elements from its start."""

    variable: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    num_elements: int


@dataclass(frozen=True)
class RowType:
    """The type of one row of a factor. Workers differ only in the number of rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Detail:
    """An integer keyword of a gradient besides its factors."""

    name: str
    value: int


@dataclass(frozen=True)
class SentFactors:
    """The factors that workers send in place of a whole gradient: the form's operation, and the types of the factors' rows."""

    operation: str
    rows: tuple[RowType, ...]
    details: tuple[Detail, ...] = ()

    def __str__(self) -> str:
        details = "".join(f", {detail.name}={detail.value}" for detail in self.details)
        return f"{self.operation} of {', '.join(map(str, self.rows))}{details}"


@dataclass(frozen=True)
class Elements:
    """Consecutive elements of a bucket: the first one, and one past the last."""

    start: int
    stop: int


@dataclass(frozen=True)
class Pack:
    """Consecutive elements of a bucket that are communicated by one collective.

    Attributes:
        number: its index among the packs of all buckets, in the order of launches.
        stop: one past its last element.
    """

    number: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Gradients that are applied together. They are reduced together, too, unless the bucket is cut into packs.

    Attributes:
        index: its number, and the tag of its collectives.
        slots: disjoint, at aligned offsets.
        num_elements: with padding.
        sent_factors: the factors sent between workers for each slot's gradient; empty if they send sums.
        gathers_factors: devices gather the factors of all its gradients, in place of adding up whole ones.
        part: the elements that this worker updates, and has optimizer state of; None for all.
        owner: the replica that alone updates it.
        packs: in order of the elements; a gradient may lie in several. Empty if each bucket is one pack, with its number.
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
        """Its units of communication: its packs, or all of it."""
        return self.packs or (Pack(self.index, 0, self.num_elements),)

    @property
    def is_cut(self) -> bool:
        return len(self.packs) > 1

    def slots_in(self, pack: Pack) -> list[Slot]:
        """The slots in a pack, partial ones included. Elements between two slots count as those of the first."""
        ends = [*(slot.offset for slot in self.slots[1:]), self.num_elements]
        return [
            slot for slot, end in zip(self.slots, ends, strict=True) if slot.offset < pack.stop and pack.start < end
        ]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_sent_as_factors(self) -> bool:
        return bool(self.sent_factors)

    @property
    def is_gathered(self) -> bool:
        """Tests for a bucket whose devices gather factors, or rows for its optimizer."""
        return self.gathers_factors or self.rule.takes_rows

    @functools.cached_property
    def slot_of(self) -> Mapping[str, Slot]:
        return {slot.variable: slot for slot in self.slots}

    def share(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements that a replica sums up of its worker's gradients: the first, and one past the last. May be empty."""
        return self.placement.value.share(self.num_elements, replica, num_replicas, self.owner)

    def updated(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements that a replica updates: its share of the bucket, or of its worker's part."""
        if self.part is None:
            return self.share(replica, num_replicas)
        start, stop = self.placement.value.share(self.part.stop - self.part.start, replica, num_replicas, self.owner)
        return self.part.start + start, self.part.start + stop

    def made(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements of a sum that a replica makes from factors."""
        return (self.updated if self.is_sent_as_factors else self.share)(replica, num_replicas)

    def owner_of_parameters(self, replica: int) -> int:
        """The replica whose parameters a replica reads: itself, if it has its own copy."""
        return self.placement.value.owner(replica)

    def is_updated_by(self, replica: int, num_replicas: int) -> bool:
        """Tests for a replica that writes parameters of this bucket."""
        if self.has_owner or not self.updates_by_shares:
            return self.owner_of_parameters(replica) == replica
        start, stop = self.updated(replica, num_replicas)
        return start < stop

    @property
    def has_owner(self) -> bool:
        return self.placement.value.has_owner

    @property
    def updates_by_shares(self) -> bool:
        """Tests for updates by shares. One that is not element-wise needs the whole sum."""
        return self.placement.value.updates_by_shares and (self.rule.elementwise or self.has_owner)

    @property
    def reduces_by_shares(self) -> bool:
        """Tests for sums by shares. Of a cut bucket each replica gets every pack, because a share must be consecutive."""
        return self.updates_by_shares and not self.is_cut

    @property
    def is_written_last(self) -> bool:
        return self.placement.value.is_written_last


def are_cut(buckets: Sequence[Bucket]) -> bool:
    """Tests for buckets in packs, whose operations have the keyword ``pack``."""
    return any(bucket.packs for bucket in buckets)
