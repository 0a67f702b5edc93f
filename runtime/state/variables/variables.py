"""The store of all replicas' variables, which detects the user's writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Role, Synchronization, Variable
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.state.variables.layout import (
    FlatBucket,
    Layout,
    Moved,
    allocate_buckets,
    allocate_per_replica,
    check_members,
    check_type,
    mirror_first,
    names_in,
    shared_copies,
)
from mirrorc.runtime.state.variables.shown_buffers import CopiesOfShown
from mirrorc.user.aliased_tensors import refuse_shared_memory, warn_of_holders


@dataclass
class Watched:
    """A tensor as mirrorc last used it. ``home`` is its memory in mirrorc's buffers, or None."""

    tensor: torch.Tensor
    version: int
    address: int
    home: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, home: torch.Tensor | None) -> Watched:
        return cls(tensor, tensor._version, tensor.data_ptr(), home)

    def has_changed(self) -> bool:
        return self.tensor._version != self.version or self.has_moved()

    def has_moved(self) -> bool:
        return self.tensor.data_ptr() != self.address

    def note(self) -> None:
        self.version, self.address = self.tensor._version, self.tensor.data_ptr()


def count_write(written: Collection[Watched]) -> None:
    """Increments versions of tensors that mirrorc has written, and marks the tensors as unchanged."""
    torch.autograd.graph.increment_version([watched.tensor for watched in written])
    for watched in written:
        watched.version = watched.tensor._version


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def leave_homes_of_others(changed: Collection[Watched], watched: Collection[Watched]) -> None:
    """Allocates memory for tensors that the user put into other variables' homes, as in a swap."""
    homes = {memory_of(entry.home) for entry in watched if entry.home is not None}
    for entry in changed:
        is_home = entry.home is not None and entry.tensor.data_ptr() == entry.home.data_ptr()
        if not is_home and memory_of(entry.tensor) in homes:
            entry.tensor.data = entry.tensor.detach().clone()


_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Members:
    """The tensors of a store. Immutable, because a call in another thread may iterate over them.

    Attributes:
        names: id of a tensor -> its name.
        guarded: variables with guards on shape and dtype; a change compiles a new program.
        counters: id of a statistic -> id of its counter; forwards do not change the statistic's version.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    guarded: frozenset[str] = frozenset()
    counters: Mapping[int, int] = field(default_factory=dict)

    def with_added(
        self, tensors: Mapping[str, torch.Tensor], counters: Mapping[int, int], *, are_guarded: bool = False
    ) -> Members:
        """Adds tensors. Members may be among them, under the same names."""
        new = tensors.keys() - self.tensors.keys()
        return Members(
            {**self.tensors, **tensors},
            {**self.names, **{id(tensor): name for name, tensor in tensors.items()}},
            self.guarded | new if are_guarded else self.guarded - tensors.keys(),
            {**self.counters, **counters},
        )

    def joined(self, other: Members, names: Mapping[str, str]) -> Members:
        new = {names[name]: tensor for name, tensor in other.tensors.items() if names[name] not in self.tensors}
        return Members(
            {**self.tensors, **new},
            {**self.names, **{id(tensor): name for name, tensor in new.items()}},
            self.guarded | (new.keys() & {names[name] for name in other.guarded}),
            {**other.counters, **self.counters},
        )

    def only(self, remaining: Collection[str]) -> Members:
        names = {key: name for key, name in self.names.items() if name in remaining}
        return Members(
            {name: tensor for name, tensor in self.tensors.items() if name in remaining},
            names,
            self.guarded.intersection(remaining),
            {key: counter for key, counter in self.counters.items() if key in names and counter in names},
        )

    def counter_of(self, name: str) -> str | None:
        tensor = self.tensors.get(name)
        return self.names.get(self.counters[id(tensor)]) if id(tensor) in self.counters else None

    def counted(self) -> set[str]:
        return {self.names[key] for pair in self.counters.items() for key in pair if key in self.names}


def counters_among(tensors: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Ids of a model's statistics -> ids of their counters, which are buffers of the same module."""
    counters = {}
    for name, tensor in tensors.items():
        counter = tensors.get(f"{name.rpartition('.')[0]}.{_COUNTER}".removeprefix("."))
        if counter is not None and counter is not tensor and not isinstance(tensor, torch.nn.Parameter):
            counters[id(tensor)] = id(counter)
    return counters


class VariableStore:
    """Memory of every variable on every replica.

    The user's parameters are views of replica 0's flat buffers. Devices with common memory share variables that no step
    writes. A buffer that forward writes has a copy on each replica; after every step, the user's buffer gets their
    aggregate. The user's writes between steps are detected and mirrored.

    Several steps may hold a store, see `step_variables`; ``owner`` is the number of a step's optimizers.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], devices: Sequence[Device]) -> None:
        self._members = Members().with_added(tensors, counters_among(tensors))
        self.devices = devices
        self._layout = Layout()
        self._watched: dict[str, Watched] = {}
        self._trained: dict[int, list[Watched]] = {}  # parameters in buckets, by owner
        self._written: dict[str, Aggregation] = {}  # per-replica variables that the running program writes
        self._writing: tuple[int, ...] = ()  # the replicas that write them
        self._freed: set[int] = set()  # owners without further updates
        self._moved: frozenset[int] = frozenset()  # ids of tensors that were views of this store's memory
        self._copies = CopiesOfShown(devices)
        self.loaded_buffers: dict[str, Mapping[str, Any]] = {}
        self._has_copies = len({device.torch_device for device in devices}) > 1
        _stores.add(self)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._members.tensors

    @property
    def names(self) -> Mapping[int, str]:
        return self._members.names

    def add(
        self, tensors: Mapping[str, torch.Tensor], counters: Mapping[int, int], *, are_guarded: bool = False
    ) -> None:
        self._members = self._members.with_added(tensors, counters, are_guarded=are_guarded)

    def taking_over(self, other: VariableStore, names: Mapping[str, str]) -> Callable[[], None]:
        """Prepares a merge with another store under new names. Returns the function that merges; after an interrupt it
        may be called again.

        Per-replica variables stay in place. Common variables must be equal.
        """
        members = self._members.joined(other._members, names)
        layout, taken = self._layout.joined(other._layout.without_buckets(other.tensors), names)
        watched = {**self._watched, **{names[name]: other._watched[name] for name in taken}}

        def put_in_place() -> None:
            self._members, self._layout, self._watched = members, layout, watched
            self._moved |= other._moved
            self.loaded_buffers |= {names[name]: buffer for name, buffer in other.loaded_buffers.items()}
            _stores.discard(other)

        return put_in_place

    def keep_only(self, ids: Collection[int]) -> None:
        """Keeps variables with these tensor ids, others that share memory with them, and all variables in buckets."""
        layout, names = self._layout.only({name for name, tensor in self.tensors.items() if id(tensor) in ids})
        watched = {name: watched for name, watched in self._watched.items() if name in names}
        self._copies.keep_only(names)
        self._layout, self._watched, self._members = layout, watched, self._members.only(names)
        self._moved &= self.names.keys()

    def buckets_of(self, owner: int) -> Sequence[FlatBucket]:
        return self._layout.planned.get(owner, ())

    def plan_of(self, owner: int) -> tuple[Bucket, ...]:
        return self._layout.plan_of(owner)

    def free_buckets(self, owner: int) -> None:
        self._freed.add(owner)
        layout = self._layout  # another step may read it now: nothing in it is changed in place
        layout.planned = {other: flats for other, flats in layout.planned.items() if other != owner}
        self._trained = {other: trained for other, trained in self._trained.items() if other != owner}
        parameters = {name for name in layout.separate if isinstance(self.tensors[name], torch.nn.Parameter)}
        layout.separate = layout.separate - (parameters - layout.in_buckets)

    def values(self, name: str) -> list[torch.Tensor]:
        return self._layout.values[name]

    def has_per_replica(self, name: str) -> bool:
        return name in self._layout.separate and not isinstance(self.tensors[name], torch.nn.Parameter)

    def read_by(self, variable: Variable) -> list[torch.Tensor]:
        """The tensors that a program reads, by replica.

        A program that does not write a per-replica buffer reads its aggregate.
        """
        name = variable.name
        is_shown = variable.synchronization is Synchronization.MIRRORED and variable.role is Role.BUFFER
        if not is_shown or name not in self._layout.separate:
            return self.values(name)
        home = self._watched[name].home
        assert home is not None, f"{name} is per-replica, so it is shown somewhere"
        return self._copies.of(name, home)

    def lay_out(self, program: Program, owner: int = 0) -> Layout:
        """Allocates memory for a program's variables and copies their values; the user's tensors stay in place.

        If the user has given a parameter new memory, it gets new flat memory, because the user may hold the old one.
        Another owner's buckets stay, unless the new buckets contain its parameters or the user has moved one.

        Raises:
            ValueError: a parameter has a new shape or dtype, or shares memory with another parameter or process.
        """
        old, moved = self._layout, self._moved_by_user()
        if old.program() is program and not moved:
            return old
        planned = {other: flats for other, flats in old.planned.items() if moved.isdisjoint(names_in(flats))}
        new = Layout(Moved.NOTHING, planned, dict(old.values), list(old.aggregates), set(old.separate))
        new.program = weakref.ref(program)
        if program.has_parameters_in_buckets and (owner not in planned or new.plan_of(owner) != program.buckets):
            self._lay_out_buckets(new, program.buckets, owner)
        has_other_buckets = planned.keys() != old.planned.keys() or any(
            flats is not old.planned[other] for other, flats in planned.items()
        )
        if has_other_buckets:
            new.separate = {name for name in new.separate if not isinstance(self.tensors[name], torch.nn.Parameter)}
            new.separate |= new.in_buckets
        written = [v for v in program.variables.values() if v.synchronization is Synchronization.PER_REPLICA]
        self._written, self._writing = {v.name: v.aggregation for v in written}, program.present
        first_written = [variable for variable in written if variable.name not in new.separate]
        if first_written:
            allocate_per_replica(new, first_written, self.tensors, self.devices, self._members.counted())
        counters = [self._members.counter_of(name) for name in program.variables] if self._has_copies else []
        for name in (*program.variables, *filter(None, counters)):
            is_constant = name not in self.tensors  # of the captured graph; its executor holds it
            if not is_constant and name not in new.separate and (name not in new.values or has_other_buckets):
                new.values[name] = shared_copies(self.tensors[name], self.devices)
                new.homes[name] = None
        has_moved = planned.get(owner) is not old.planned.get(owner)
        new.moved = Moved.BUCKETS if has_moved else Moved.BUFFERS if first_written else Moved.NOTHING
        return new

    def _lay_out_buckets(self, new: Layout, plan: tuple[Bucket, ...], owner: int) -> None:
        fitting = new.make_room(plan, owner)
        if fitting is not None:
            new.planned[owner] = fitting
            return
        check_members(plan, self.tensors)
        old, planned = self._layout, {slot.variable for bucket in plan for slot in bucket.slots}
        moved = self._moved.union(*(store.names for store in list(_stores) if store is not self))
        held = {name: tensor for name, tensor in self.tensors.items() if name in planned and id(tensor) not in moved}
        warn_of_holders(held, (*self.tensors.values(), *(v for name in held for v in old.values.get(name, ()))))
        return_freed_memory()  # gradients get untouched pages: some slots are never written
        new.planned[owner] = allocate_buckets(new, plan, self.tensors, self.devices)

    def _moved_by_user(self) -> set[str]:
        """Parameters moved by other steps over the same model do not count."""
        moved = [watched.tensor for trained in self._trained.values() for watched in trained if watched.has_moved()]
        if not moved:
            return set()
        stores = [store for store in list(_stores) if store is not self]
        others = {memory_of(flat.parameters[0]) for store in stores for flat in store._layout.buckets}
        return {self.names[id(tensor)] for tensor in moved if memory_of(tensor) not in others}

    def adopt(self, layout: Layout) -> None:
        """Gives the user's tensors the memory of a layout, as their ``.data``."""
        for name, home in layout.homes.items():
            if home is not None:
                self.tensors[name].data = home
            self._watched[name] = Watched.of(self.tensors[name], home)
        self._moved |= {id(self.tensors[name]) for name, home in layout.homes.items() if home is not None}
        self._layout = layout
        self._trained = {
            owner: [self._watched[slot.variable] for flat in flats for slot in flat.bucket.slots]
            for owner, flats in layout.planned.items()
        }
        layout.homes, layout.moved = {}, Moved.NOTHING

    def holds(self, program: Program, owner: int) -> bool:
        names = [name for name in program.variables if name in self.tensors]
        has_plan = (
            not program.has_parameters_in_buckets or owner in self._freed or self.plan_of(owner) == program.buckets
        )
        return has_plan and all(name in self._layout.values for name in names)

    def has_changes(self) -> bool:
        """Detects writes by version and memory. `mirror_changes` also finds writes that leave versions unchanged."""
        return any(watched.has_changed() for watched in self._watched.values())

    def mirror_changes(self, stepped: Collection[int] = ()) -> bool:
        """Mirrors the user's writes since the last step. Returns True if a variable has new memory.

        Parameters with ids in ``stepped`` count as written.
        """
        watched = self._watched
        changed = [name for name, its in watched.items() if its.has_changed() or id(its.tensor) in stepped]
        for shown in self._layout.aggregates:
            changed += [name for name in shown.written_by_user() if name not in changed]
        if changed:
            counters = [name for name in changed if not self._keeps_its_bits(name)]
            changed += [name for name in watched if name not in changed and self._members.counter_of(name) in counters]
        if any(self.tensors[name].data_ptr() != self._watched[name].address for name in changed):
            refuse_shared_memory(self.tensors, self._layout.separate)
            leave_homes_of_others([self._watched[name] for name in changed], self._watched.values())
        for name in changed:
            known = self._layout.values[name][0]
            if name in self._layout.separate or name not in self._members.guarded:
                check_type(name, self.tensors[name], known.shape, known.dtype)
        has_moved = [self._mirror(name) for name in changed]
        for shown in self._layout.aggregates if changed else ():
            shown.note()
        if self._has_copies:
            self._copies.renew()
        return any(has_moved)

    def _keeps_its_bits(self, name: str) -> bool:
        """True for an aggregate with unchanged bits: BatchNorm writes its counter if a state_dict lacks it."""
        return any(name in shown.names and not shown.is_written(name) for shown in self._layout.aggregates)

    def written(self, owner: int) -> list[torch.Tensor]:
        names = [name for name in self._layout.separate if not isinstance(self.tensors[name], torch.nn.Parameter)]
        parameters = [flat.parameters[0] for flat in self.buckets_of(owner)]
        return [*parameters, *(value for name in names for value in self._layout.values[name])]

    def mirror_all(self) -> None:
        """Copies replica 0's parameters to all replicas, after an incomplete step."""
        for flat in self._layout.buckets:
            mirror_first(flat.parameters)

    def _mirror(self, name: str) -> bool:
        tensor, values, watched = self.tensors[name], self._layout.values[name], self._watched[name]
        if name in self._layout.separate:
            assert watched.home is not None
            new = tensor.detach().clone()
            for value in (watched.home, *values):
                value.copy_(new)
            tensor.data = watched.home
        elif watched.has_moved():
            self._layout.values[name] = shared_copies(tensor, self.devices)
        else:
            for copy in {id(value): value for value in values if value.data_ptr() != watched.address}.values():
                copy.copy_(tensor.detach())
        has_moved = name not in self._layout.separate and watched.has_moved()
        watched.note()
        return has_moved

    def count_update(self, owner: int) -> None:
        """Increments the version of each updated parameter, so that autograd refuses a stale backward."""
        count_write(self._trained.get(owner, []))

    def aggregate(self) -> None:
        for shown in self._layout.aggregates:
            shown.aggregate(self._written, self._writing)
            count_write([self._watched[name] for name in shown.names & self._written.keys()])

    def show(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            for tensor in (self.tensors[name].detach(), *self._layout.values[name]):
                tensor.copy_(value)
        for shown in self._layout.aggregates:
            shown.note()
        count_write([self._watched[name] for name in values])


_stores: weakref.WeakSet[VariableStore] = weakref.WeakSet()
