"""The layout of variables in flat buffers, one per bucket and replica."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.program import Program
from mirrorc.runtime.state.variables.user_buffers import ShownBuffers


@dataclass
class FlatBucket:
    """A bucket's memory on every replica.

    Attributes:
        parameters: replica -> 1-D parameters; one tensor for all replicas that share it.
        gradient_slots: replica -> views of the gradients by slot; empty for sparse rows.
        touched: replica -> row indices of the step's sparse gradient; see `gradients.sparse_rows`.
    """

    bucket: Bucket
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    gradient_slots: list[list[torch.Tensor]]
    touched: dict[int, torch.Tensor] = field(default_factory=dict)


def slot_views(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    return [
        torch.as_strided(flat, slot.shape, slot.strides, flat.storage_offset() + slot.offset) for slot in bucket.slots
    ]


def memory_for_gradients(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """A bucket's memory, with zeros in gaps between slots; empty for sparse rows.

    Slots are not initialized, so that unused pages take no memory.
    """
    if bucket.rule.takes_rows:
        return torch.empty(0, dtype=bucket.dtype, device=device)
    flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=device)
    ends = [0, *(slot.offset + slot.num_elements for slot in bucket.slots)]
    for end, start in zip(ends, [*(slot.offset for slot in bucket.slots), bucket.num_elements], strict=True):
        flat[end:start].zero_()
    return flat


class Moved(enum.Enum):
    NOTHING = enum.auto()
    BUFFERS = enum.auto()  # buffers first written by this program
    BUCKETS = enum.auto()  # parameters and gradients of the program's buckets, and maybe buffers


@dataclass
class Layout:
    """New memory of all variables. The user's tensors change only in `VariableStore.adopt`.

    Attributes:
        moved: variables with new memory since the previous layout.
        planned: owner (the number of a step's optimizers) -> its buckets. Owners share the memory of equal buckets.
        aggregates: aggregates of per-replica buffers, as in the user's model.
        separate: variables with a tensor on every replica.
        homes: variable -> the new memory of the user's tensor; None if it does not move.
    """

    moved: Moved = Moved.NOTHING
    planned: dict[int, list[FlatBucket]] = field(default_factory=dict)
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    aggregates: list[ShownBuffers] = field(default_factory=list)
    separate: set[str] = field(default_factory=set)
    homes: dict[str, torch.Tensor | None] = field(default_factory=dict)
    program: Callable[[], Program | None] = lambda: None

    @property
    def buckets(self) -> Iterator[FlatBucket]:
        return itertools.chain.from_iterable(self.planned.values())

    @property
    def in_buckets(self) -> set[str]:
        return {name for flats in self.planned.values() for name in names_in(flats)}

    def plan_of(self, owner: int) -> tuple[Bucket, ...]:
        return tuple(flat.bucket for flat in self.planned.get(owner, ()))

    def without_buckets(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        return replace(
            self,
            planned={},
            separate={name for name in self.separate if not isinstance(tensors[name], torch.nn.Parameter)},
        )

    def joined(self, other: Layout, names: Mapping[str, str]) -> tuple[Layout, set[str]]:
        """A copy with another layout's variables, renamed, without its buckets; and the former names of added
        variables.
        """
        taken = {name for name in other.values if names[name] not in self.values or name in other.separate}
        both = replace(
            self,
            values={**self.values, **{names[name]: other.values[name] for name in taken}},
            separate=self.separate | {names[name] for name in other.separate},
            aggregates=[*self.aggregates, *(shown.renamed(names) for shown in other.aggregates)],
            program=lambda: None,  # the next one is laid out anew
        )
        return both, taken

    def only(self, names: Collection[str]) -> tuple[Layout, set[str]]:
        """A copy with these variables, others that share memory with them, and all buckets; and the names of its
        variables.
        """
        aggregates = [shown for shown in self.aggregates if not shown.names.isdisjoint(names)]
        remaining = {*names, *self.in_buckets}.union(*(shown.names for shown in aggregates))
        values = {name: values for name, values in self.values.items() if name in remaining}
        separate = self.separate & remaining
        return replace(self, values=values, separate=separate, aggregates=aggregates, program=lambda: None), remaining

    def make_room(self, plan: Sequence[Bucket], owner: int) -> list[FlatBucket] | None:
        """Removes buckets that conflict with a new plan.

        Returns another owner's buckets to share, if their layout is equal.
        """
        self.planned.pop(owner, None)
        for other, flats in list(self.planned.items()):
            if _lie_alike([flat.bucket for flat in flats], plan):
                return [replace(flat, bucket=bucket) for flat, bucket in zip(flats, plan, strict=True)]
            if not names_in(flats).isdisjoint(slot.variable for bucket in plan for slot in bucket.slots):
                del self.planned[other]
        return None


def names_in(buckets: Sequence[FlatBucket]) -> set[str]:
    return {slot.variable for flat in buckets for slot in flat.bucket.slots}


def _lie_alike(plan: Sequence[Bucket], other: Sequence[Bucket]) -> bool:
    return len(plan) == len(other) and all(
        replace(a, rule=b.rule) == b and a.rule.takes_rows == b.rule.takes_rows
        for a, b in zip(plan, other, strict=True)
    )
