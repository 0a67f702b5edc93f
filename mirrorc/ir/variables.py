"""Variables of a program: parameters and buffers, where they live, and how they are updated."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Role(enum.Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"


class Synchronization(enum.Enum):
    MIRRORED = "mirrored"  # the same value on every replica, after every step
    PER_REPLICA = "per-replica"  # each replica writes its own


class Aggregation(enum.Enum):
    """How a per-replica variable is read as one value."""

    NONE = "none"
    MEAN = "mean"
    FIRST = "first"  # replica 0's


class Placement(enum.Enum):
    """Where the parameters of a bucket are."""

    MIRRORED = "mirrored"  # a copy on every replica
    SHARED = "shared"  # one copy in the memory that all devices share


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which a parameter is updated. Gradients may share a bucket only if their rules are equal.

    Attributes:
        label: a readable name, such as ``AdamW group 0``.
        group: index of the optimizer's parameter group.
        state_class: a number. Parameters have the same one if their optimizer states have the same entries and equal
            scalars such as ``step``, which a flat update requires.
        elementwise: whether the update may run on a whole bucket at once.
    """

    label: str
    group: int
    state_class: int = 0
    elementwise: bool = True


@dataclass(frozen=True)
class Variable:
    """A parameter or buffer of the captured model. Tied weights are one variable, under their first name.

    Attributes:
        name: its name in the user's model.
        shape: its shape, the same on every replica.
        strides: how it lies in memory, dense; a parameter in channels-last format stays so.
        dtype: its dtype.
        role: parameter or buffer.
        synchronization: mirrored, or per-replica for buffers that the forward writes.
        aggregation: how a per-replica variable is read as one.
        update: the rule by which the optimizer changes it; None if nothing updates it.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    synchronization: Synchronization = Synchronization.MIRRORED
    aggregation: Aggregation = Aggregation.NONE
    update: UpdateRule | None = None
