"""Stores the variables of all replicas in flat buffers, one per bucket and replica, of which variables are views."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Synchronization, Variable
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.shared_memory import refuse_shared_memory


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


def _for_gradients(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Allocates memory for gradients. Gaps between slots are zero; slots are not initialized, so unused pages stay untouched."""
    flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=device)
    ends = [0, *(slot.offset + slot.num_elements for slot in bucket.slots)]
    for end, start in zip(ends, [*(slot.offset for slot in bucket.slots), bucket.num_elements], strict=True):
        flat[end:start].zero_()
    return flat


@dataclass
class _Watched:
    """A tensor of the user, as mirrorc last saw it. ``home`` is mirrorc's memory, of which the tensor should be a view."""

    tensor: torch.Tensor
    version: int
    address: int
    home: torch.Tensor | None

    def has_changed(self) -> bool:
        return self.tensor._version != self.version or self.tensor.data_ptr() != self.address

    def note(self) -> None:
        self.version, self.address = self.tensor._version, self.tensor.data_ptr()


class Moved(enum.Enum):
    """Which variables got other memory when a program was laid out."""

    NOTHING = enum.auto()
    BUFFERS = enum.auto()  # buffers that this program is the first to write
    BUCKETS = enum.auto()  # parameters and gradients, and maybe buffers


class VariableStore:
    """Holds every variable on every replica.

    The user's parameters are replica 0's: they become views of its flat buffers. Variables that no step writes are shared
    by devices of one memory. Buffers that the forward writes are each replica's own; the user's buffer shows them
    aggregated, after every step. What the user writes between steps is noticed and mirrored.

    Args:
        tensors: the user's parameters and buffers, by name of their variable.
        devices: the devices, in order of replicas.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], devices: Sequence[Device]) -> None:
        self.tensors = dict(tensors)
        self.devices = devices
        self.buckets: list[FlatBucket] = []
        self._values: dict[str, list[torch.Tensor]] = {}
        self._watched: dict[str, _Watched] = {}
        self._aggregates: list[tuple[Aggregation, torch.Tensor, list[torch.Tensor]]] = []
        self._own: set[str] = set()  # variables with a tensor for every replica

    @property
    def plan(self) -> tuple[Bucket, ...]:
        """The bucket plan that the memory is laid out for."""
        return tuple(flat.bucket for flat in self.buckets)

    def values(self, name: str) -> list[torch.Tensor]:
        """A variable on every replica, in order. A shared tensor is listed once for each replica."""
        return self._values[name]

    def lay_out(self, program: Program) -> Moved:
        """Allocates memory for a program's variables and moves them there; returns which ones have moved."""
        moved = self.plan != program.buckets
        if moved:
            refuse_shared_memory(self.tensors, {slot.variable for b in program.buckets for slot in b.slots})
            self.buckets = []
            return_freed_memory()  # so that gradients get untouched pages, because some slots are never written
            gradients = [[_for_gradients(b, device.torch_device) for device in self.devices] for b in program.buckets]
            self.buckets = [self._make_bucket(*pair) for pair in zip(program.buckets, gradients, strict=True)]
            self._own = {name for name in self._own if not isinstance(self.tensors[name], torch.nn.Parameter)}
            self._own |= {slot.variable for flat in self.buckets for slot in flat.bucket.slots}
        written = [v for v in program.variables.values() if v.synchronization is Synchronization.PER_REPLICA]
        new = [variable for variable in written if variable.name not in self._own]
        if new:
            self._make_per_replica(new)
        for name in program.variables:
            is_constant = name not in self.tensors  # of the captured graph; its executor holds it
            if not is_constant and name not in self._own and (name not in self._values or moved):
                self._share(name)
        return Moved.BUCKETS if moved else Moved.BUFFERS if new else Moved.NOTHING

    def _make_bucket(self, bucket: Bucket, gradients: list[torch.Tensor]) -> FlatBucket:
        owners = [bucket.owner_of_parameters(replica) for replica in range(len(self.devices))]
        copies = {
            owner: torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=self.devices[owner].torch_device)
            for owner in dict.fromkeys(owners)
        }
        parameters = [copies[owner] for owner in owners]
        views = [slot_views(flat, bucket) for flat in parameters]
        for i, slot in enumerate(bucket.slots):
            own = self.tensors[slot.variable]
            views[0][i].copy_(own.detach())
            own.data = views[0][i]
            self._values[slot.variable] = [view[i] for view in views]
            self._watch(slot.variable, views[0][i])
        _mirror_first(parameters)
        return FlatBucket(bucket, parameters, gradients, [slot_views(flat, bucket) for flat in gradients])

    def _make_per_replica(self, variables: Sequence[Variable]) -> None:
        """Puts buffers of one dtype side by side, so that one addition aggregates them all."""
        kinds: dict[tuple[torch.dtype, Aggregation], list[Variable]] = {}
        for variable in variables:
            kinds.setdefault((variable.dtype, variable.aggregation), []).append(variable)
        for (dtype, aggregation), members in kinds.items():
            sizes = [self.tensors[v.name].numel() for v in members]
            flats = [torch.empty(sum(sizes), dtype=dtype, device=d.torch_device) for d in self.devices]
            seen = flats[0] if len(flats) == 1 else torch.empty_like(flats[0])
            offset = 0
            for variable, size in zip(members, sizes, strict=True):
                own = self.tensors[variable.name]
                views = [flat[offset : offset + size].view(variable.shape) for flat in flats]
                for view in views:
                    view.copy_(own)
                shown = seen[offset : offset + size].view(variable.shape)
                shown.copy_(own)
                own.data = shown
                self._values[variable.name] = views
                self._own.add(variable.name)
                self._watch(variable.name, shown)
                offset += size
            if len(flats) > 1:
                self._aggregates.append((aggregation, seen, flats))

    def _share(self, name: str) -> None:
        own, copies = self.tensors[name].detach(), {}
        copies[own.device] = own
        for device in self.devices:
            if device.torch_device not in copies:
                copies[device.torch_device] = own.to(device.torch_device)
        self._values[name] = [copies[device.torch_device] for device in self.devices]
        self._watch(name, None)

    def _watch(self, name: str, home: torch.Tensor | None) -> None:
        tensor = self.tensors[name]
        self._watched[name] = _Watched(tensor, tensor._version, tensor.data_ptr(), home)

    def holds(self, program: Program) -> bool:
        """Whether memory is laid out for a program."""
        names = [name for name in program.variables if name in self.tensors]
        return self.plan == program.buckets and all(name in self._values for name in names)

    def mirror_changes(self) -> bool:
        """Mirrors what the user has written to parameters and buffers since the last step, for example by ``load_state_dict``.

        Returns:
            Whether a variable got other memory.

        Raises:
            ValueError: a variable has become one of another shape or dtype, or now shares its memory with another one.
        """
        changed = [name for name, watched in self._watched.items() if watched.has_changed()]
        if any(self.tensors[name].data_ptr() != self._watched[name].address for name in changed):
            refuse_shared_memory(self.tensors, self._own)
        for name in changed:
            self._mirror(name)
        return not self._own.issuperset(changed)

    def mirror_all(self) -> None:
        """Copies replica 0's parameters to all replicas, after a step that did not finish."""
        for flat in self.buckets:
            _mirror_first(flat.parameters)

    def _mirror(self, name: str) -> None:
        tensor, values = self.tensors[name], self._values[name]
        if tensor.shape != values[0].shape or tensor.dtype != values[0].dtype:
            raise ValueError(
                f"variable {name!r} was {values[0].dtype}{list(values[0].shape)} and has become "
                f"{tensor.dtype}{list(tensor.shape)} since the step was compiled: compile the changed model anew"
            )
        if name not in self._own:
            self._share(name)
            return
        new, watched = tensor.detach().clone(), self._watched[name]
        assert watched.home is not None
        for value in (watched.home, *values):
            value.copy_(new)
        tensor.data = watched.home
        watched.note()

    def aggregate(self) -> None:
        """Shows per-replica variables, aggregated, in the user's model."""
        for aggregation, shown, flats in self._aggregates:
            shown.copy_(flats[0])
            if aggregation is Aggregation.MEAN:
                for flat in flats[1:]:
                    shown.add_(flat.to(shown.device))
                shown.div_(len(flats))


def _mirror_first(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        if tensor is not tensors[0]:
            tensor.copy_(tensors[0])
