"""Where the variables of all replicas lie: in flat buffers, one per bucket and replica, of which they are views."""

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
        bucket: the plan.
        parameters: for each replica, its parameters, 1-D; one tensor for all where they are shared.
        gradients: for each replica, its gradients, 1-D.
        gradient_slots: for each replica, views of its gradients in order of the slots; none where the optimizer takes rows.
        touched: for each replica that has added up rows in this step, their indices, see `gradients.sparse_rows`.
    """

    bucket: Bucket
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    gradient_slots: list[list[torch.Tensor]]
    touched: dict[int, torch.Tensor] = field(default_factory=dict)


def slot_views(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """Views of a bucket-shaped tensor in order of the slots."""
    return [
        torch.as_strided(flat, slot.shape, slot.strides, flat.storage_offset() + slot.offset) for slot in bucket.slots
    ]


def memory_for_gradients(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Allocates memory for gradients. Gaps between slots are zero; slots are not initialized, so unused pages stay untouched.

    Rows that an optimizer takes as they are need none.
    """
    if bucket.rule.takes_rows:
        return torch.empty(0, dtype=bucket.dtype, device=device)
    flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=device)
    ends = [0, *(slot.offset + slot.num_elements for slot in bucket.slots)]
    for end, start in zip(ends, [*(slot.offset for slot in bucket.slots), bucket.num_elements], strict=True):
        flat[end:start].zero_()
    return flat


class Moved(enum.Enum):
    """Which variables got other memory when a program was laid out."""

    NOTHING = enum.auto()
    BUFFERS = enum.auto()  # buffers that this program is the first to write
    BUCKETS = enum.auto()  # parameters and gradients of the program's own buckets, and maybe buffers


@dataclass
class Layout:
    """Where all variables are. It is made aside: until `VariableStore.adopt` puts it in place, nothing of the user has changed.

    Attributes:
        moved: which variables get other memory than in the layout before.
        planned: the memory of the buckets, by the number of the optimizers that update them. Two have parameters in common
            only if their buckets lie alike: then they have the memory in common.
        values: for each variable, its tensor on every replica.
        aggregates: per-replica variables as they are shown.
        own: the variables with a tensor for every replica.
        homes: for each variable that was laid out, the memory that the user's tensor becomes a view of; None if it stays its own.
        program: refers to the last program that it was made for.
    """

    moved: Moved = Moved.NOTHING
    planned: dict[int, list[FlatBucket]] = field(default_factory=dict)
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    aggregates: list[ShownBuffers] = field(default_factory=list)
    own: set[str] = field(default_factory=set)
    homes: dict[str, torch.Tensor | None] = field(default_factory=dict)
    program: Callable[[], Program | None] = lambda: None

    @property
    def buckets(self) -> Iterator[FlatBucket]:
        """All buckets."""
        return itertools.chain.from_iterable(self.planned.values())

    @property
    def in_buckets(self) -> set[str]:
        """The parameters that lie in buckets."""
        return {name for flats in self.planned.values() for name in names_in(flats)}

    def plan_of(self, owner: int) -> tuple[Bucket, ...]:
        """The bucket plan of some optimizers that memory is laid out for; empty if it is not."""
        return tuple(flat.bucket for flat in self.planned.get(owner, ()))

    def without_buckets(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """One in which parameters are where they are, and belong to no buckets."""
        return replace(
            self, planned={}, own={name for name in self.own if not isinstance(tensors[name], torch.nn.Parameter)}
        )

    def joined(self, other: Layout, names: Mapping[str, str]) -> tuple[Layout, set[str]]:
        """One that has the variables of another one without buckets, too, under other names; and the former ones of those."""
        taken = {name for name in other.values if names[name] not in self.values or name in other.own}
        both = replace(
            self,
            values={**self.values, **{names[name]: other.values[name] for name in taken}},
            own=self.own | {names[name] for name in other.own},
            aggregates=[*self.aggregates, *(shown.renamed(names) for shown in other.aggregates)],
            program=lambda: None,  # the next one is laid out anew
        )
        return both, taken

    def only(self, names: Collection[str]) -> tuple[Layout, set[str]]:
        """One without other variables; and those that are kept, with those that lie in one memory with them."""
        aggregates = [shown for shown in self.aggregates if not shown.names.isdisjoint(names)]
        kept = {*names, *self.in_buckets}.union(*(shown.names for shown in aggregates))
        values = {name: values for name, values in self.values.items() if name in kept}
        return replace(self, values=values, own=self.own & kept, aggregates=aggregates, program=lambda: None), kept

    def make_room(self, plan: Sequence[Bucket], owner: int) -> list[FlatBucket] | None:
        """Takes out buckets that cannot stay beside those that optimizers get now.

        Returns:
            Other optimizers' buckets whose memory the new ones may have in common, if there are any.
        """
        self.planned.pop(owner, None)
        for other, flats in list(self.planned.items()):
            if _lie_alike([flat.bucket for flat in flats], plan):
                return [replace(flat, bucket=bucket) for flat, bucket in zip(flats, plan, strict=True)]
            if not names_in(flats).isdisjoint(slot.variable for bucket in plan for slot in bucket.slots):
                del self.planned[other]
        return None


def names_in(buckets: Sequence[FlatBucket]) -> set[str]:
    """The parameters that lie in some buckets."""
    return {slot.variable for flat in buckets for slot in flat.bucket.slots}


def _lie_alike(one: Sequence[Bucket], other: Sequence[Bucket]) -> bool:
    """Whether the parameters and gradients of two plans lie alike, whoever updates them."""
    return len(one) == len(other) and all(
        replace(a, rule=b.rule) == b and a.rule.takes_rows == b.rule.takes_rows for a, b in zip(one, other, strict=True)
    )
