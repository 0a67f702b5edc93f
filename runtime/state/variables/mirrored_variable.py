"""The user's view of a variable: one value, or a value per replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Role, Variable
from mirrorc.runtime.state.variables.step_variables import StepVariables


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
