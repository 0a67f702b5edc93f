"""Where the variables of all replicas lie: in flat buffers, one per bucket and replica, of which they are views."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.program import Program
from mirrorc.runtime.state.shown_buffers import ShownBuffers


@dataclass
class FlatBucket:
    """A bucket's memory on every replica.

    Attributes:
        bucket: the plan.
        parameters: for each replica, its parameters, 1-D; one tensor for all where they are shared.
        gradients: for each replica, its gradients, 1-D.
        gradient_slots: for each replica, views of its gradients in order of the slots.
    """

    bucket: Bucket
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    gradient_slots: list[list[torch.Tensor]]


def slot_views(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """Views of a bucket-shaped tensor in order of the slots."""
    return [
        torch.as_strided(flat, slot.shape, slot.strides, flat.storage_offset() + slot.offset) for slot in bucket.slots
    ]


def memory_for_gradients(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Allocates memory for gradients. Gaps between slots are zero; slots are not initialized, so unused pages stay untouched."""
    flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=device)
    ends = [0, *(slot.offset + slot.num_elements for slot in bucket.slots)]
    for end, start in zip(ends, [*(slot.offset for slot in bucket.slots), bucket.num_elements], strict=True):
        flat[end:start].zero_()
    return flat


class Moved(enum.Enum):
    """Which variables got other memory when a program was laid out."""

    NOTHING = enum.auto()
    BUFFERS = enum.auto()  # buffers that this program is the first to write
    BUCKETS = enum.auto()  # parameters and gradients, and maybe buffers


@dataclass
class Layout:
    """Where all variables are. It is made aside: until `VariableStore.adopt` puts it in place, nothing of the user has changed.

    Attributes:
        moved: which variables get other memory than in the layout before.
        buckets: the memory of the buckets.
        values: for each variable, its tensor on every replica.
        aggregates: per-replica variables as they are shown.
        own: the variables with a tensor for every replica.
        homes: for each variable that was laid out, the memory that the user's tensor becomes a view of; None if it stays its own.
        program: refers to the last program that it was made for.
    """

    moved: Moved = Moved.NOTHING
    buckets: list[FlatBucket] = field(default_factory=list)
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    aggregates: list[ShownBuffers] = field(default_factory=list)
    own: set[str] = field(default_factory=set)
    homes: dict[str, torch.Tensor | None] = field(default_factory=dict)
    program: Callable[[], Program | None] = lambda: None

    @property
    def plan(self) -> tuple[Bucket, ...]:
        """The bucket plan that the memory is laid out for."""
        return tuple(flat.bucket for flat in self.buckets)
