"""The layout of variables in flat buffers, one per bucket and replica, and the allocation of memory."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Variable
from mirrorc.messages.problem import problem
from mirrorc.runtime.state.variables.shown_buffers import ShownBuffers
from mirrorc.user.aliased_tensors import refuse_memory_of_processes, refuse_shared_memory

OF_PARTS = -1
"""The block for parts of gradients."""


class ReservedMemory:
    """Blocks of memory by replica and number, which all programs of a step reuse.

    A block is allocated at its first use, grows on demand, and stays until the step is closed.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = [device.torch_device for device in devices]
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}

    def block(self, replica: int, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialized tensor in a block; thread-safe across replicas."""
        num_elements = torch.Size(shape).numel()
        num_bytes = num_elements * dtype.itemsize
        block = self._blocks.get((replica, number))
        if block is None or block.numel() < num_bytes:
            del block
            self._blocks.pop((replica, number), None)  # freed before the larger one is allocated
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self._devices[replica])
            self._blocks[replica, number] = block
        return block[:num_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        self._blocks.clear()


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
    offset = flat.storage_offset()
    return [torch.as_strided(flat, slot.shape, slot.strides, offset + slot.offset) for slot in bucket.slots]


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
        separate = {name for name in self.separate if not isinstance(tensors[name], torch.nn.Parameter)}
        return replace(self, planned={}, separate=separate)

    def joined(self, other: Layout, names: Mapping[str, str]) -> tuple[Layout, set[str]]:
        """A copy with another layout's variables, renamed, without buckets; and the former names of added ones."""
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
        """A copy with these variables, those that share their memory, and all buckets; and its variables' names."""
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


def allocate_buckets(
    layout: Layout, plan: Sequence[Bucket], tensors: Mapping[str, torch.Tensor], devices: Sequence[Device]
) -> list[FlatBucket]:
    gradients = [[memory_for_gradients(bucket, device.torch_device) for device in devices] for bucket in plan]
    return [_bucket(layout, *pair, tensors, devices) for pair in zip(plan, gradients, strict=True)]


def _bucket(
    layout: Layout,
    bucket: Bucket,
    gradients: list[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    devices: Sequence[Device],
) -> FlatBucket:
    owners = [bucket.owner_of_parameters(replica) for replica in range(len(devices))]
    copies = {
        owner: torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=devices[owner].torch_device)
        for owner in dict.fromkeys(owners)
    }
    parameters = [copies[owner] for owner in owners]
    views = [slot_views(flat, bucket) for flat in parameters]
    for i, slot in enumerate(bucket.slots):
        views[0][i].copy_(tensors[slot.variable].detach())
        layout.values[slot.variable] = [view[i] for view in views]
        layout.homes[slot.variable] = views[0][i]
    mirror_first(parameters)
    slots = [slot_views(flat, bucket) if not bucket.rule.takes_rows else [] for flat in gradients]
    return FlatBucket(bucket, parameters, gradients, slots)


def mirror_first(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        if tensor is not tensors[0]:
            tensor.copy_(tensors[0])


def allocate_per_replica(
    layout: Layout,
    variables: Sequence[Variable],
    tensors: Mapping[str, torch.Tensor],
    devices: Sequence[Device],
    counted: Collection[str],
) -> None:
    kinds: dict[tuple[torch.dtype, Aggregation], list[Variable]] = {}
    for variable in variables:
        kinds.setdefault((variable.dtype, variable.aggregation), []).append(variable)
    for (dtype, _), members in kinds.items():
        sizes = [tensors[v.name].numel() for v in members]
        flats = [torch.empty(sum(sizes), dtype=dtype, device=device.torch_device) for device in devices]
        seen = flats[0] if len(flats) == 1 else torch.empty_like(flats[0])
        offset = 0
        for variable, size in zip(members, sizes, strict=True):
            value = tensors[variable.name].detach()
            views = [flat[offset : offset + size].view(variable.shape) for flat in flats]
            shown = seen[offset : offset + size].view(variable.shape)
            for view in (*views, shown):
                view.copy_(value)
            layout.values[variable.name], layout.homes[variable.name] = views, shown
            layout.separate.add(variable.name)
            offset += size
        if len(flats) > 1:
            by_name = {variable.name: size for variable, size in zip(members, sizes, strict=True)}
            layout.aggregates.append(ShownBuffers(by_name, seen, flats, counted))


def shared_copies(tensor: torch.Tensor, devices: Sequence[Device]) -> list[torch.Tensor]:
    """A tensor per replica: the user's, and a copy per other torch device."""
    original, copies = tensor.detach(), {}
    copies[original.device] = original
    for device in devices:
        if device.torch_device not in copies:
            copies[device.torch_device] = original.to(device.torch_device)
    return [copies[device.torch_device] for device in devices]


def check_members(plan: Sequence[Bucket], tensors: Mapping[str, torch.Tensor]) -> None:
    planned = {slot.variable: (slot.shape, bucket.dtype) for bucket in plan for slot in bucket.slots}
    members = [name for name in tensors if name in planned]
    for name in members:
        check_type(name, tensors[name], *planned[name])
    refuse_shared_memory(tensors, members)
    refuse_memory_of_processes(tensors, members)


def check_type(name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
        raise problem(
            ValueError,
            f"MC1206: the model's {name!r} was {dtype}{list(shape)} and has become "
            f"{tensor.dtype}{list(tensor.shape)} since it was compiled",
            fix="make a new optimizer over model.parameters(), and compile the model anew",
        )
