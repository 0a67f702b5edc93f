"""Parameters and buffers: where they live, and how they are updated."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

SHARE_ELEMENTS = 64
"""Shares begin at multiples of so many elements: two devices never write to the same cache line."""


def share_bounds(num_elements: int, num_shares: int, index: int) -> tuple[int, int]:
    """A share is a half-open range. Shares are disjoint, in order, and cover all elements."""
    units = -(-num_elements // SHARE_ELEMENTS)
    start, stop = (min(num_elements, units * i // num_shares * SHARE_ELEMENTS) for i in (index, index + 1))
    return start, stop


OUTSIDE = "outside."
"""Prefix of a variable's name if its module is outside of the model."""


class Role(enum.Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"


class Synchronization(enum.Enum):
    MIRRORED = "mirrored"  # the same value on every replica, after every step
    PER_REPLICA = "per-replica"  # each replica writes its own


class Aggregation(enum.Enum):
    NONE = "none"
    MEAN = "mean"
    FIRST = "first"  # replica 0's
    SAME = "same"  # any replica's: all write the same value; replicas that did not run get it
    COUNTER = "counter"  # as SAME, but each microbatch continues from the previous one


@dataclass(frozen=True)
class PlacementFacts:
    """The properties of a placement.

    Attributes:
        word, description: used in messages.
        in_table: text in the table of buckets; empty for the default.
        owner: maps a replica to the replica whose memory holds its parameters.
        updates_by_shares: a replica updates only its share.
        is_written_last: parameters are written after the last read by any device.
        has_owner: one replica updates the bucket; others copy the result.
    """

    word: str
    in_table: str
    description: str
    owner: Callable[[int], int] = field(repr=False)
    share: Callable[[int, int, int, int | None], tuple[int, int]] = field(repr=False)
    updates_by_shares: bool
    is_written_last: bool
    has_owner: bool = False


def _itself(replica: int) -> int:
    return replica


def _first_replica(replica: int) -> int:
    return 0


def _whole(num_elements: int, replica: int, num_replicas: int, owner: int | None) -> tuple[int, int]:
    return 0, num_elements


def _share_of_replica(num_elements: int, replica: int, num_replicas: int, owner: int | None) -> tuple[int, int]:
    return share_bounds(num_elements, num_replicas, replica)


def _all_to_owner(num_elements: int, replica: int, num_replicas: int, owner: int | None) -> tuple[int, int]:
    return (0, num_elements) if replica == owner else (0, 0)


class Placement(enum.Enum):
    """Where a bucket's parameters and updates are. Saved programs contain the member's name."""

    MIRRORED = PlacementFacts(
        word="mirrored",
        in_table="",
        description="every device has its own copy of the parameters and updates it whole",
        owner=_itself,
        share=_whole,
        updates_by_shares=False,
        is_written_last=False,
    )
    SHARED = PlacementFacts(
        word="shared",
        in_table="shared",
        description="one copy of the parameters, of which each device updates its share",
        owner=_first_replica,
        share=_share_of_replica,
        updates_by_shares=True,
        is_written_last=True,
    )
    OWNED = PlacementFacts(
        word="owned",
        in_table="owned by",
        description="one device has the optimizer's state and updates, and each other one has a copy of what it has updated",
        owner=_itself,
        share=_all_to_owner,
        updates_by_shares=True,
        is_written_last=False,
        has_owner=True,
    )


LEFT_TO_USER = "p.grad"
"""The label of gradients that no optimizer of the program takes."""


@dataclass(frozen=True)
class UpdateRule:
    """How a parameter is updated; equal for all gradients of a bucket.

    Attributes:
        label: such as ``AdamW group 0``.
        group: counted over all optimizers.
        state_class: equal for optimizer states with the same entries and equal scalars.
        elementwise: the update treats each element alike, so it can run on a flat bucket.
        takes_rows: the optimizer gets a table's gradient as a sparse tensor.
        writes_rows: the optimizer writes only the looked-up rows.
        may_be_unused: a step leaves out the parameter if no replica has used it.
    """

    label: str
    group: int
    state_class: int = 0
    elementwise: bool = True
    takes_rows: bool = False
    writes_rows: bool = False
    may_be_unused: bool = False

    @property
    def is_flat(self) -> bool:
        """True if the update takes flat gradients of a bucket, or the user gets views of them."""
        return self.elementwise or self.leaves_whole_gradient

    @property
    def leaves_whole_gradient(self) -> bool:
        """True for the user's ``p.grad``, unless it is sparse."""
        return self.label == LEFT_TO_USER and not self.takes_rows

    @property
    def why_by_itself(self) -> str:
        return f"{self.label} {'takes rows of a table' if self.takes_rows else 'does not work element by element'}"


@dataclass(frozen=True)
class Variable:
    """A parameter or buffer. Tied weights are one variable, under their first name.

    Attributes:
        synchronization: per replica for buffers that forward writes.
        update: None if nothing updates it.
        is_on_host: a scalar in CPU memory, although the devices are GPUs.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    synchronization: Synchronization = Synchronization.MIRRORED
    aggregation: Aggregation = Aggregation.NONE
    update: UpdateRule | None = None
    is_on_host: bool = False
