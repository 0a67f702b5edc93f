"""The variables of a step under its own names, as users see them and as checkpoints have them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Role, Variable
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.messages.wording import counted, numbered
from mirrorc.runtime.state.variables.layout import FlatBucket, Layout
from mirrorc.runtime.state.variables.variables import VariableStore


class StepVariables:
    """A step's view of a shared store: its variables, and the buckets of its optimizers.

    Args:
        names: the step's name -> the store's name.
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
        self._counters = {**self._counters, **counters}
        self.tensors = {**self.tensors, **tensors}
        self._added = self._added | tensors.keys()
        self._names = {**self._names, **names}
        self._is_renamed = any(name != other for name, other in self._names.items())
        self._renamed = {}

    def moved(self, names: Mapping[str, str], store: VariableStore, owner: int) -> StepVariables:
        other = StepVariables(self.tensors, names, store, owner)
        other._added, other._counters = self._added, self._counters
        return other

    def drop_unless(self, names: Collection[str]) -> bool:
        gone = self._added.difference(names, {c for name, c in self._counters.items() if name in names})
        self._added = self._added - gone
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in gone}
        return bool(gone)

    @property
    def devices(self) -> Sequence[Device]:
        return self._store.devices

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        return self._store.buckets_of(self._owner)

    def ids_of_parameters(self) -> list[int]:
        return [id(tensor) for tensor in self.tensors.values() if isinstance(tensor, torch.nn.Parameter)]

    def has(self, program: Program) -> bool:
        return self._store.holds(self.in_store(program), self._owner)

    def has_buckets_of(self, program: Program) -> bool:
        return self._store.plan_of(self._owner) == self.in_store(program).buckets

    def values(self, name: str) -> list[torch.Tensor]:
        tensor = self.tensors[name]
        if id(tensor) not in self._store.names:
            return [tensor.detach()] * len(self.devices)
        return self._store.values(self._names[name])

    @property
    def loaded_buffers(self) -> dict[str, Mapping[str, Any]]:
        """Loaded buffers that wait for memory, by name. Steps over one variable share its buffer."""
        loaded = self._store.loaded_buffers
        return {name: loaded[other] for name, other in self._names.items() if other in loaded} if loaded else {}

    def load_buffers(self, buffers: Mapping[str, Mapping[str, Any]]) -> None:
        self.take_loaded_buffers(self.loaded_buffers)
        self._store.loaded_buffers |= {self._names[name]: buffer for name, buffer in buffers.items()}

    def take_loaded_buffers(self, names: Collection[str]) -> dict[str, Mapping[str, Any]]:
        return {name: self._store.loaded_buffers.pop(self._names[name]) for name in names}

    def per_replica(self) -> dict[str, list[torch.Tensor]]:
        names = [
            name for name, other in self._names.items() if name in self.tensors and self._store.has_per_replica(other)
        ]
        return {name: self.values(name) for name in names}

    def read_by(self, variable: Variable) -> list[torch.Tensor]:
        return self._store.read_by(self._of_store(variable))

    def lay_out(self, program: Program) -> Layout:
        return self._store.lay_out(self.in_store(program), self._owner)

    def written(self) -> list[torch.Tensor]:
        return self._store.written(self._owner)

    def count_update(self) -> None:
        self._store.count_update(self._owner)

    def aggregate(self) -> None:
        self._store.aggregate()

    def show(self, values: Mapping[str, torch.Tensor]) -> None:
        self._store.show({self._names[name]: value for name, value in values.items()})

    def in_store(self, program: Program) -> Program:
        """The program with the store's names of variables; cached, so that its identity is stable."""
        if not self._is_renamed:
            return program
        known = self._renamed.get(id(program))
        if known is None or known[0]() is not program:
            self._renamed = {key: pair for key, pair in self._renamed.items() if pair[0]() is not None}
            variables = {name: variable for name, variable in program.variables.items() if name in self._names}
            renamed = program.evolve(
                variables={self._names[name]: self._of_store(variable) for name, variable in variables.items()},
                buckets=tuple(self.bucket_in_store(bucket) for bucket in program.buckets),
            )
            known = self._renamed[id(program)] = weakref.ref(program), renamed
        return known[1]

    def bucket_in_store(self, bucket: Bucket) -> Bucket:
        slots = tuple(replace(slot, variable=self._names[slot.variable]) for slot in bucket.slots)
        return replace(bucket, slots=slots)

    def _of_store(self, variable: Variable) -> Variable:
        name = self._names[variable.name]
        return variable if name == variable.name else replace(variable, name=name)


def names_in_store(tensors: Mapping[str, torch.Tensor], store: VariableStore, model_name: str) -> dict[str, str]:
    """The store's name for each of a step's tensors; may be new.

    If a new name is in use, all new names get the model's name as a prefix, to keep a module's variables together.
    """
    new = [name for name, tensor in tensors.items() if id(tensor) not in store.names]
    prefix = ""
    while any(f"{prefix}{name}" in store.tensors for name in new):
        prefix += f"{model_name}."
    return {name: store.names.get(id(tensor), f"{prefix}{name}") for name, tensor in tensors.items()}


_MODEL, _REPLICAS = "model", "replicas"


class SavedBuffers:
    """Per-replica buffers of a checkpoint, until a training program allocates them.

    Replicas get the saved values only if the model's buffer equals the checkpoint's. Steps over one model share loaded
    buffers.
    """

    def __init__(self) -> None:
        self._unknown: dict[str, Mapping[str, Any]] = {}  # loaded for variables that the step's first call adds

    def state_dict(self, store: StepVariables) -> dict[str, dict[str, Any]]:
        """Copies of the buffers whose replicas differ from the model, by name."""
        saved: dict[str, dict[str, Any]] = {
            name: _copied(buffer) for name, buffer in (self._unknown | store.loaded_buffers).items()
        }
        for name, values in store.per_replica().items():
            shown = store.tensors[name].detach()
            if name not in saved and not all(have_equal_bits(value, shown) for value in values):
                saved[name] = {_MODEL: shown.clone(), _REPLICAS: [value.clone() for value in values]}
        return saved

    def load_state_dict(self, state: Mapping[str, Any], store: StepVariables) -> None:
        self.check(state, store)
        copies = {name: _copied(buffer) for name, buffer in state.items()}
        store.load_buffers({name: buffer for name, buffer in copies.items() if name in store.tensors})
        self._unknown = {name: buffer for name, buffer in copies.items() if name not in store.tensors}

    @staticmethod
    def check(state: Mapping[str, Any], store: StepVariables) -> None:
        if not isinstance(state, Mapping):
            raise problem(
                TypeError,
                f"MC7002: replica_buffers in the state of a step is a {type(state).__name__}, not a dict",
                fix="step.load_state_dict(state), with state = step.state_dict()",
            )
        for name, buffer in state.items():
            _check(name, buffer, store)

    def write(self, store: StepVariables) -> None:
        if not self._unknown and not store.loaded_buffers:
            return
        foreign: list[str] = []
        replicas = store.per_replica()
        loaded = store.take_loaded_buffers([name for name in store.loaded_buffers if name in replicas])
        loaded |= {name: self._unknown.pop(name) for name in list(self._unknown) if name in replicas}
        for name, buffer in loaded.items():
            if have_equal_bits(buffer[_MODEL], store.tensors[name].detach()):
                for value, saved in zip(replicas[name], buffer[_REPLICAS], strict=True):
                    value.copy_(saved)
            else:
                foreign.append(name)
        if foreign:
            warnings.warn(
                message(
                    f"MC7007: the model's {numbered('buffer', [repr(name) for name in foreign])} differ from "
                    "those of the loaded checkpoint",
                    "step.load_state_dict() was given another checkpoint than the model",
                    "load the model's state of the same checkpoint",
                    now="all replicas begin with the model's",
                ),
                stacklevel=users_stack_level(),
            )


def _copied(buffer: Mapping[str, Any]) -> dict[str, Any]:
    return {_MODEL: buffer[_MODEL].clone(), _REPLICAS: [value.clone() for value in buffer[_REPLICAS]]}


def _check(name: str, buffer: Any, store: StepVariables) -> None:
    is_buffer = isinstance(buffer, Mapping) and buffer.keys() == {_MODEL, _REPLICAS}
    if not is_buffer or not all(isinstance(value, torch.Tensor) for value in (buffer[_MODEL], *buffer[_REPLICAS])):
        raise problem(
            TypeError,
            f"MC7002: {name!r} in replica_buffers of a step's state is no such buffer",
            fix="step.load_state_dict(state), with state = step.state_dict()",
        )
    if len(buffer[_REPLICAS]) != len(store.devices):
        raise problem(
            ValueError,
            f"MC7001: {name!r} is saved for {counted(len(buffer[_REPLICAS]), 'replica')}, and this step has {len(store.devices)}",
            "a buffer that forward writes is saved once for each replica",
            f"mirrorc.compile(..., devices={len(buffer[_REPLICAS])}), as when it was saved",
        )
    tensor = store.tensors.get(name)
    if tensor is None and not name.startswith("outside."):  # which the first call finds
        raise problem(
            ValueError,
            f"MC7001: {name!r} in replica_buffers is no buffer of this model",
            fix="step.load_state_dict(state), with a state of a step over this model",
        )
    if tensor is not None and any(value.shape != tensor.shape for value in buffer[_REPLICAS]):
        raise problem(
            ValueError,
            f"MC7001: {name!r} in replica_buffers has another shape than the model's, {list(tensor.shape)}",
            fix="build the model as it was when the state was saved",
        )


def have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bits, on any devices; NaN equals itself."""
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class MirroredVariable:
    """A read-only variable with a value on every device.

    Attributes:
        name: in the model.
        synchronization: mirrored or per-replica.
        aggregation: reduction of a per-replica variable to one value.
    """

    def __init__(self, variable: Variable, devices: Sequence[Device], store: StepVariables) -> None:
        self.name = variable.name
        self.role: Role = variable.role
        self.synchronization = variable.synchronization
        self.aggregation = variable.aggregation
        self._devices, self._store = devices, store

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._store.values(self.name))

    @property
    def value(self) -> torch.Tensor:
        """The mirrored value, or the aggregate of per-replica values."""
        return self._store.tensors[self.name].detach()

    def get(self, device: str) -> torch.Tensor:
        """The value on one device.

        Raises:
            ValueError: no such device in this program.
        """
        names = [d.name for d in self._devices]
        if str(device) not in names:
            raise ValueError(f"variable {self.name!r} is not on {device!r}: it is on {', '.join(names)}")
        return self.values[names.index(str(device))]

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.values[0].shape)
        names = ", ".join(d.name for d in self._devices)
        return (
            f"MirroredVariable({self.name!r}, {self.values[0].dtype}[{shape}], {self.synchronization.value} on {names})"
        )


def mirrored_variables(program: Program, store: StepVariables, names: Mapping[str, str]) -> dict[str, MirroredVariable]:
    """Variables of a program by name. Tied weights have an entry for each name.

    Args:
        names: further name -> the program's name.
    """
    variables = {
        name: MirroredVariable(variable, program.devices, store)
        for name, variable in program.variables.items()
        if name in store.tensors
    }
    for name, variable in names.items():
        if variable in variables:
            variables.setdefault(name.removeprefix("model."), variables[variable])
    return variables
