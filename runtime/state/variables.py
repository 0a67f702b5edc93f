"""Stores the variables of all replicas, and follows what the user does to them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Role, Synchronization, Variable
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.state.layout import FlatBucket, Layout, Moved, memory_for_gradients, slot_views
from mirrorc.runtime.state.shown_buffers import CopiesOfShown, ShownBuffers, counted_by, counter_of
from mirrorc.runtime.state.watched_tensor import Watched
from mirrorc.shared_memory import refuse_memory_of_processes, refuse_shared_memory, warn_of_holders


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
        self._layout = Layout()
        self._watched: dict[str, Watched] = {}
        self._trained: list[Watched] = []  # parameters that lie in buckets
        self._written: frozenset[str] = frozenset()  # per-replica variables that the program that runs now writes
        self._writing: tuple[int, ...] = ()  # the replicas that write them
        self._has_moved_parameters = False  # whether they have been in buckets
        self._copies = CopiesOfShown(devices)
        self._has_copies = len({device.torch_device for device in devices}) > 1
        _stores.add(self)

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        """The memory of the buckets."""
        return self._layout.buckets

    @property
    def plan(self) -> tuple[Bucket, ...]:
        """The bucket plan that the memory is laid out for."""
        return self._layout.plan

    def values(self, name: str) -> list[torch.Tensor]:
        """A variable on every replica, in order. A shared tensor is listed once for each replica."""
        return self._layout.values[name]

    def read_by(self, variable: Variable) -> list[torch.Tensor]:
        """What a program that has this variable reads on every replica, in order.

        A program that does not write a per-replica buffer reads what the model shows, as a model in eval mode would.
        """
        name = variable.name
        is_shown = variable.synchronization is Synchronization.MIRRORED and variable.role is Role.BUFFER
        if not is_shown or name not in self._layout.own:
            return self.values(name)
        home = self._watched[name].home
        assert home is not None, f"{name} is per-replica, so it is shown somewhere"
        return self._copies.of(name, home)

    def lay_out(self, program: Program) -> Layout:
        """Allocates memory for a program's variables and copies them there; the user's tensors stay where they are.

        Parameters to which the user has given other memory since get new memory, too: the old one may have been kept for later. A
        program that evaluates takes the buckets that there are; there are none if parameters have been given other memory.

        Raises:
            ValueError: a parameter has become one of another shape or dtype, or shares its memory with another one or with
                other processes.
        """
        old, has_new_memory = self._layout, self._has_been_given_memory()
        if old.program() is program and not has_new_memory:
            return old
        plan = program.buckets if program.trains else () if has_new_memory else old.plan
        moved = old.plan != plan or has_new_memory
        new = Layout(Moved.NOTHING, old.buckets, dict(old.values), list(old.aggregates), set(old.own))
        new.program = weakref.ref(program)
        if moved:
            planned = {slot.variable: (slot.shape, b.dtype) for b in plan for slot in b.slots}
            members = [name for name in self.tensors if name in planned]
            for name in members:
                self._check_type(name, *planned[name])
            refuse_shared_memory(self.tensors, members)
            refuse_memory_of_processes(self.tensors, members)
            first = planned.keys() - (old.values.keys() if self._has_moved_parameters else set())
            held = {name: own for name, own in self._known_to_this_alone() if name in first}
            warn_of_holders(held, (*self.tensors.values(), *(v for name in held for v in old.values.get(name, ()))))
            return_freed_memory()  # so that gradients get untouched pages, because some slots are never written
            gradients = [[memory_for_gradients(b, device.torch_device) for device in self.devices] for b in plan]
            new.buckets = [self._make_bucket(new, *pair) for pair in zip(plan, gradients, strict=True)]
            new.own = {name for name in new.own if not isinstance(self.tensors[name], torch.nn.Parameter)}
            new.own |= {slot.variable for flat in new.buckets for slot in flat.bucket.slots}
        written = [v for v in program.variables.values() if v.synchronization is Synchronization.PER_REPLICA]
        self._written, self._writing = frozenset(variable.name for variable in written), program.present
        first_written = [variable for variable in written if variable.name not in new.own]
        if first_written:
            self._make_per_replica(new, first_written)
        counters = [counter_of(name) for name in program.variables] if self._has_copies else []
        for name in (*program.variables, *counters):
            is_constant = name not in self.tensors  # of the captured graph; its executor holds it
            if not is_constant and name not in new.own and (name not in new.values or moved):
                new.values[name] = self._shared(name)
                new.homes[name] = None
        new.moved = Moved.BUCKETS if moved else Moved.BUFFERS if first_written else Moved.NOTHING
        return new

    def _has_been_given_memory(self) -> bool:
        """Whether the user has given a parameter other memory; steps over the same model do so in turn, which does not count."""
        moved = [watched.tensor for watched in self._trained if watched.has_moved()]
        if not moved:
            return False
        others = {
            _memory_of(flat.parameters[0]) for store in list(_stores) if store is not self for flat in store.buckets
        }
        return any(_memory_of(tensor) not in others for tensor in moved)

    def _known_to_this_alone(self) -> Iterator[tuple[str, torch.Tensor]]:
        others = {id(tensor) for store in list(_stores) if store is not self for tensor in store.tensors.values()}
        return ((name, tensor) for name, tensor in self.tensors.items() if id(tensor) not in others)

    def adopt(self, layout: Layout) -> None:
        """Puts a layout of `lay_out` in place. Both layouts have the same values, so this may be repeated from any point."""
        for name, home in layout.homes.items():
            if home is not None:
                self.tensors[name].data = home
            self._watch(name, home)
        self._layout = layout
        self._trained = [self._watched[slot.variable] for flat in layout.buckets for slot in flat.bucket.slots]
        self._has_moved_parameters = self._has_moved_parameters or bool(layout.buckets)
        layout.homes, layout.moved = {}, Moved.NOTHING

    def _make_bucket(self, layout: Layout, bucket: Bucket, gradients: list[torch.Tensor]) -> FlatBucket:
        owners = [bucket.owner_of_parameters(replica) for replica in range(len(self.devices))]
        copies = {
            owner: torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=self.devices[owner].torch_device)
            for owner in dict.fromkeys(owners)
        }
        parameters = [copies[owner] for owner in owners]
        views = [slot_views(flat, bucket) for flat in parameters]
        for i, slot in enumerate(bucket.slots):
            views[0][i].copy_(self.tensors[slot.variable].detach())
            layout.values[slot.variable] = [view[i] for view in views]
            layout.homes[slot.variable] = views[0][i]
        _mirror_first(parameters)
        return FlatBucket(bucket, parameters, gradients, [slot_views(flat, bucket) for flat in gradients])

    def _make_per_replica(self, layout: Layout, variables: Sequence[Variable]) -> None:
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
                own = self.tensors[variable.name].detach()
                views = [flat[offset : offset + size].view(variable.shape) for flat in flats]
                shown = seen[offset : offset + size].view(variable.shape)
                for view in (*views, shown):
                    view.copy_(own)
                layout.values[variable.name], layout.homes[variable.name] = views, shown
                layout.own.add(variable.name)
                offset += size
            if len(flats) > 1:
                by_name = {variable.name: size for variable, size in zip(members, sizes, strict=True)}
                counted = [name for name in by_name if counter_of(name) in self.tensors]
                layout.aggregates.append(ShownBuffers(aggregation, by_name, seen, flats, counted))

    def _shared(self, name: str) -> list[torch.Tensor]:
        """A variable that no step writes, on every replica: the user's tensor, and a copy for each other device's memory."""
        own, copies = self.tensors[name].detach(), {}
        copies[own.device] = own
        for device in self.devices:
            if device.torch_device not in copies:
                copies[device.torch_device] = own.to(device.torch_device)
        return [copies[device.torch_device] for device in self.devices]

    def _watch(self, name: str, home: torch.Tensor | None) -> None:
        tensor = self.tensors[name]
        self._watched[name] = Watched(tensor, tensor._version, tensor.data_ptr(), home)

    def holds(self, program: Program) -> bool:
        """Whether memory is laid out for a program."""
        names = [name for name in program.variables if name in self.tensors]
        return (not program.trains or self.plan == program.buckets) and all(
            name in self._layout.values for name in names
        )

    def mirror_changes(self, stepped: Collection[int] = ()) -> bool:
        """Mirrors what the user has written to parameters and buffers since the last step, for example by ``load_state_dict``.

        Parameters whose ids are in ``stepped`` count as written, whatever their versions say. Returns whether a variable got
        other memory.

        Raises:
            ValueError: a variable has become one of another shape or dtype, or now shares its memory with another one.
        """
        watched = self._watched.items()
        changed = [name for name, its in watched if its.has_changed() or id(self.tensors[name]) in stepped]
        for shown in self._layout.aggregates:
            changed += [name for name in shown.written_by_user() if name not in changed]
        changed += counted_by(changed, self._watched) if changed else []
        if any(self.tensors[name].data_ptr() != self._watched[name].address for name in changed):
            refuse_shared_memory(self.tensors, self._layout.own)
            self._leave_homes_of_others(changed)
        for name in changed:
            self._check_type(name, self._layout.values[name][0].shape, self._layout.values[name][0].dtype)
        has_moved = [self._mirror(name) for name in changed]
        for shown in self._layout.aggregates if changed else ():
            shown.note()
        if self._has_copies:
            self._copies.renew()
        return any(has_moved)

    def written(self) -> list[torch.Tensor]:
        """What a step may write besides the optimizer's state: replica 0's parameters, and per-replica variables."""
        names = [name for name in self._layout.own if not isinstance(self.tensors[name], torch.nn.Parameter)]
        parameters = [flat.parameters[0] for flat in self.buckets]
        return [*parameters, *(value for name in names for value in self._layout.values[name])]

    def mirror_all(self) -> None:
        """Copies replica 0's parameters to all replicas, after a step that did not finish."""
        for flat in self.buckets:
            _mirror_first(flat.parameters)

    def _leave_homes_of_others(self, changed: Sequence[str]) -> None:
        """Gives memory of its own to each tensor that the user has put where another variable belongs, as by an exchange."""
        homes = {w.home.untyped_storage().data_ptr() for w in self._watched.values() if w.home is not None}
        for name in changed:
            tensor, home = self.tensors[name], self._watched[name].home
            is_home = home is not None and tensor.data_ptr() == home.data_ptr()
            if not is_home and tensor.untyped_storage().data_ptr() in homes:
                tensor.data = tensor.detach().clone()

    def _check_type(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        tensor = self.tensors[name]
        if tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"variable {name!r} was {dtype}{list(shape)} and has become {tensor.dtype}{list(tensor.shape)} since the step "
                "was compiled: compile the changed model anew"
            )

    def _mirror(self, name: str) -> bool:
        """Gives all replicas the present value of the user's tensor; returns whether the variable got other memory."""
        tensor, values, watched = self.tensors[name], self._layout.values[name], self._watched[name]
        if name in self._layout.own:
            assert watched.home is not None
            new = tensor.detach().clone()
            for value in (watched.home, *values):
                value.copy_(new)
            tensor.data = watched.home
        elif watched.has_moved():
            self._layout.values[name] = self._shared(name)
        else:
            for copy in {id(value): value for value in values if value.data_ptr() != watched.address}.values():
                copy.copy_(tensor.detach())
        has_moved = name not in self._layout.own and watched.has_moved()
        watched.note()
        return has_moved

    def count_update(self) -> None:
        """Counts a version of each parameter that the step has updated, as torch's optimizers do; may be repeated.

        So autograd refuses a backward through what it has saved of them before, and other steps over them see the update.
        """
        torch.autograd.graph.increment_version([watched.tensor for watched in self._trained])
        for watched in self._trained:
            watched.version = watched.tensor._version

    def aggregate(self) -> None:
        """Shows the per-replica variables that the step has written, aggregated, in the user's model."""
        for shown in self._layout.aggregates:
            shown.aggregate(self._written, self._writing)


def _mirror_first(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        if tensor is not tensors[0]:
            tensor.copy_(tensors[0])


_stores: weakref.WeakSet[VariableStore] = weakref.WeakSet()


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
