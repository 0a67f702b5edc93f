"""The variables of a step: under its own names, in a store that steps with other names and other optimizers may hold, too."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Variable
from mirrorc.runtime.state.variables.layout import FlatBucket, Layout
from mirrorc.runtime.state.variables.variables import VariableStore


class StepVariables:
    """What a step sees of a store: its own variables, and the buckets that its own optimizers update.

    Args:
        tensors: the user's parameters and buffers, by the step's names.
        names: for each, the name in the store.
        store: the variables of all steps that hold them together.
        owner: the number of the step's optimizers in the store.

    Attributes:
        tensors: the same.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], store: VariableStore, owner: int
    ) -> None:
        self.tensors = dict(tensors)
        self._names, self._store, self._owner = dict(names), store, owner
        self._added: frozenset[str] = frozenset()
        self._counters: Mapping[str, str] = {}  # of added statistics
        self._is_renamed = any(name != other for name, other in names.items())
        self._renamed: dict[int, tuple[weakref.ref[Program], Program]] = {}  # by the id of the step's program

    def add(self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], counters: Mapping[str, str]) -> None:
        """Adds variables, which the store has; arguments as above. ``counters`` has those of statistics among them."""
        self._counters = {**self._counters, **counters}
        self.tensors = {**self.tensors, **tensors}
        self._added = self._added | tensors.keys()
        self._names = {**self._names, **names}
        self._is_renamed = any(name != other for name, other in self._names.items())
        self._renamed = {}

    def moved(self, names: Mapping[str, str], store: VariableStore, owner: int) -> StepVariables:
        """The same variables in another store; arguments as above."""
        other = StepVariables(self.tensors, names, store, owner)
        other._added, other._counters = self._added, self._counters
        return other

    def drop_unless(self, names: Collection[str]) -> bool:
        """Drops variables that were added and have other names, nor count what is kept; gives whether there were any."""
        gone = self._added.difference(names, {c for name, c in self._counters.items() if name in names})
        self._added = self._added - gone
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in gone}
        return bool(gone)

    @property
    def devices(self) -> Sequence[Device]:
        """The devices, in order of replicas."""
        return self._store.devices

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        """The memory of the step's buckets. They name their variables as the store does."""
        return self._store.buckets_of(self._owner)

    def has(self, program: Program) -> bool:
        """Whether memory is laid out for a program."""
        return self._store.holds(self.in_store(program), self._owner)

    def has_buckets_of(self, program: Program) -> bool:
        """Whether the buckets that there are, are those of a program."""
        return self._store.plan_of(self._owner) == self.in_store(program).buckets

    def values(self, name: str) -> list[torch.Tensor]:
        """A variable on every replica, in order. A shared tensor is listed once for each replica.

        What no open step has any more is the user's tensor.
        """
        tensor = self.tensors[name]
        if id(tensor) not in self._store.names:
            return [tensor.detach()] * len(self.devices)
        return self._store.values(self._names[name])

    def read_by(self, variable: Variable) -> list[torch.Tensor]:
        """What a program that has this variable reads on every replica, see `VariableStore.read_by`."""
        return self._store.read_by(self._of_store(variable))

    def lay_out(self, program: Program) -> Layout:
        """See `VariableStore.lay_out`."""
        return self._store.lay_out(self.in_store(program), self._owner)

    def written(self) -> list[torch.Tensor]:
        """See `VariableStore.written`."""
        return self._store.written(self._owner)

    def count_update(self) -> None:
        """See `VariableStore.count_update`."""
        self._store.count_update(self._owner)

    def aggregate(self) -> None:
        """See `VariableStore.aggregate`."""
        self._store.aggregate()

    def show(self, values: Mapping[str, torch.Tensor]) -> None:
        """See `VariableStore.show`."""
        self._store.show({self._names[name]: value for name, value in values.items()})

    def in_store(self, program: Program) -> Program:
        """A program with the store's names in its tables; the same one each time."""
        if not self._is_renamed:
            return program
        known = self._renamed.get(id(program))
        if known is None or known[0]() is not program:
            self._renamed = {key: pair for key, pair in self._renamed.items() if pair[0]() is not None}
            own = {name: variable for name, variable in program.variables.items() if name in self._names}
            renamed = program.evolve(
                variables={self._names[name]: self._of_store(variable) for name, variable in own.items()},
                buckets=tuple(self.bucket_in_store(bucket) for bucket in program.buckets),
            )
            known = self._renamed[id(program)] = weakref.ref(program), renamed
        return known[1]

    def bucket_in_store(self, bucket: Bucket) -> Bucket:
        """A bucket of a program, with the store's names."""
        slots = tuple(replace(slot, variable=self._names[slot.variable]) for slot in bucket.slots)
        return replace(bucket, slots=slots)

    def _of_store(self, variable: Variable) -> Variable:
        name = self._names[variable.name]
        return variable if name == variable.name else replace(variable, name=name)


def names_in_store(tensors: Mapping[str, torch.Tensor], store: VariableStore, what: str) -> dict[str, str]:
    """A name in a store for each of a step's tensors: that which it has there, or a new one.

    New ones are the step's names, behind the name of its model if one of them is taken; a module's variables stay together.

    Args:
        tensors: by the step's names.
        store: the store.
        what: the name of the step's model.
    """
    new = [name for name, tensor in tensors.items() if id(tensor) not in store.names]
    prefix = ""
    while any(f"{prefix}{name}" in store.tensors for name in new):
        prefix += f"{what}."
    return {name: store.names.get(id(tensor), f"{prefix}{name}") for name, tensor in tensors.items()}
