"""Buckets: gradients that are reduced and applied together, and the slots in which they lie."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mirrorc.ir.variables import Placement, UpdateRule


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
class RowType:
    """The rows of one factor, which all workers have alike; only their number differs.

    Attributes:
        shape: of one row.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Detail:
    """A number on which a gradient depends besides its factors, and the keyword for it."""

    name: str
    value: int


@dataclass(frozen=True)
class SentFactors:
    """What workers send of a gradient in place of the whole one.

    Attributes:
        operation: the name of the operation of its form, see `mirrorc.ir.gradient_forms`.
        rows: the types of its factors' rows, in their order.
        details: what else it depends on.
    """

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
    """Consecutive elements of a bucket that are communicated together, by one collective.

    Attributes:
        number: its place among the packs of all buckets of the program, in the order in which they are launched.
        start: its first element, counted from the start of the bucket.
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
    """Gradients that are applied together, in the order in which they lie. They are reduced together, too, unless the bucket is
    cut.

    Attributes:
        index: its number; collectives carry it as their tag.
        dtype: the one dtype of all its gradients.
        slots: its gradients' places; slots are disjoint and begin at aligned offsets.
        num_elements: its length, padding included.
        rule: how its parameters are updated.
        placement: where its parameters are, and which replica updates which elements.
        sent_factors: what workers send each other of each gradient, in order of the slots; empty if they send sums.
        gathers_factors: whether devices gather the factors of all its gradients, in place of adding up whole ones.
        part: the elements that this worker updates, whose optimizer state it has; None if each worker updates all elements.
        owner: the replica to which its update is left, or is to be left; None if to none.
        packs: if the program's buckets are cut, what is communicated at a time, in order of the elements; a gradient may lie in
            several packs. Empty if each bucket is one pack, which has the bucket's number.
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
    def own_packs(self) -> tuple[Pack, ...]:
        """What is communicated at a time: its packs, or all of it."""
        return self.packs or (Pack(self.index, 0, self.num_elements),)

    @property
    def is_cut(self) -> bool:
        """Whether it is communicated in several packs."""
        return len(self.packs) > 1

    def slots_in(self, pack: Pack) -> list[Slot]:
        """The slots that lie in a pack, in part or as a whole. Elements between two slots count as those of the first."""
        ends = [*(slot.offset for slot in self.slots[1:]), self.num_elements]
        return [
            slot for slot, end in zip(self.slots, ends, strict=True) if slot.offset < pack.stop and pack.start < end
        ]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_sent_as_factors(self) -> bool:
        """Whether workers send each other the factors of all its gradients, in place of their sums."""
        return bool(self.sent_factors)

    @property
    def is_gathered(self) -> bool:
        """Whether devices gather factors of its gradients, or the rows that its optimizer takes."""
        return self.gathers_factors or self.rule.takes_rows

    @functools.cached_property
    def slot_of(self) -> Mapping[str, Slot]:
        """The slots, by name of the variable."""
        return {slot.variable: slot for slot in self.slots}

    def share(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements that a replica sums up of its worker's gradients: the first one, and one past the last one.

        It updates them, too, unless the worker updates a part of the bucket alone. A replica's share of a small shared bucket
        may be empty.
        """
        return self.placement.value.share(self.num_elements, replica, num_replicas, self.owner)

    def updated(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements that a replica updates, element by element: its share of the bucket, or of its worker's part."""
        if self.part is None:
            return self.share(replica, num_replicas)
        start, stop = self.placement.value.share(self.part.stop - self.part.start, replica, num_replicas, self.owner)
        return self.part.start + start, self.part.start + stop

    def made(self, replica: int, num_replicas: int) -> tuple[int, int]:
        """The elements of a sum that a replica makes where gradients are left as factors: of what workers send as factors, those
        that it updates; else, of its worker's sum, its share."""
        return (self.updated if self.is_sent_as_factors else self.share)(replica, num_replicas)

    def owner_of_parameters(self, replica: int) -> int:
        """The replica in whose memory the parameters that a replica reads are: itself, if it has its own copy."""
        return self.placement.value.owner(replica)

    def is_updated_by(self, replica: int, num_replicas: int) -> bool:
        """Whether a replica writes parameters of this bucket: its share, if that is not empty, or its own copy."""
        if self.has_owner or not self.updates_by_shares:
            return self.owner_of_parameters(replica) == replica
        start, stop = self.updated(replica, num_replicas)
        return start < stop

    @property
    def has_owner(self) -> bool:
        """Whether its owner alone gets the sum and updates, and all other replicas have copies of what the owner has updated."""
        return self.placement.value.has_owner

    @property
    def updates_by_shares(self) -> bool:
        """Whether a replica updates its share alone. An update that is not element-wise needs the whole sum."""
        return self.placement.value.updates_by_shares and (self.rule.elementwise or self.has_owner)

    @property
    def reduces_by_shares(self) -> bool:
        """Whether a replica gets its share of the sum alone. Of a bucket that is cut, it gets every pack, and takes its share of
        them.

        A share is not a share of each pack: the optimizer works on consecutive elements.
        """
        return self.updates_by_shares and not self.is_cut

    @property
    def is_written_last(self) -> bool:
        """Whether a device may write the parameters only after every other device's last read of them in the step."""
        return self.placement.value.is_written_last


def are_cut(buckets: Sequence[Bucket]) -> bool:
    """Whether the buckets of a plan are communicated in packs, which operations name besides their bucket."""
    return any(bucket.packs for bucket in buckets)
