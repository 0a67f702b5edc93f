"""What the replicas of a step hand to its caller beside the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.runtime.devices.events import kept_for_caller


@dataclass
class _Output:
    """An output: how its parts are put together, and their types, in order of replicas."""

    how: str
    types: list[torch.Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the parts along dim 0."""
        return [value.size(0) for value in self.types]


class StepOutputs:
    """Puts the outputs of a step together.

    Where all devices are of one memory, a replica writes its part of a concatenated output into the whole while the step runs.

    Args:
        program: a LOWERED program.
    """

    def __init__(self, program: Program) -> None:
        self._devices = [device.torch_device for device in program.devices]
        self._num_examples = program.num_examples
        self._outputs: dict[str, _Output] = {}
        for module in program.device_graphs.values():
            for node in calls_to(module.graph, ops.gather):
                output = self._outputs.setdefault(str(node.kwargs["output"]), _Output(str(node.kwargs["how"])))
                output.types.append(node.all_input_nodes[0].meta["val"])
        is_one_memory = all(device.type == "cpu" for device in self._devices)
        self._written = {
            name for name, output in self._outputs.items() if is_one_memory and output.how == "concatenated"
        }
        self._wholes: dict[str, torch.Tensor] = {}
        self._parts: dict[str, list[Any]] = {}

    def begin(self) -> None:
        """Begins a step: what it writes is new memory, because the caller keeps what earlier steps have given."""
        for name, output in self._outputs.items():
            self._parts[name] = [None] * len(self._devices)
            if name in self._written:
                like = output.types[0]
                shape = (sum(output.sizes), *like.shape[1:])
                self._wholes[name] = torch.empty(shape, dtype=like.dtype, device=self._devices[0])

    def part(self, replica: int, node: fx.Node) -> Callable[..., None]:
        """The function that a replica hands its part to."""
        name = str(node.kwargs["output"])
        if name not in self._written:

            def keep(value: torch.Tensor, **_: Any) -> None:
                self._parts[name][replica] = value.clone()  # its memory may be a shard's, or written again

            return keep
        sizes = self._outputs[name].sizes
        start, size = sum(sizes[:replica]), sizes[replica]

        def write(value: torch.Tensor, **_: Any) -> None:
            self._wholes[name].narrow(0, start, size).copy_(value)

        return write

    def take(self) -> dict[str, Any]:
        """The outputs of the step that has ended, by name; a list of the parts of one that is apart."""
        for parts in self._parts.values():
            for part in parts:
                if part is not None:
                    kept_for_caller(part)
        with torch.no_grad():
            found = {name: self._together(name, output) for name, output in self._outputs.items()}
        self._wholes, self._parts = {}, {}
        return found

    def _together(self, name: str, output: _Output) -> Any:
        if name in self._written:
            return self._wholes[name]
        parts: Sequence[torch.Tensor] = self._parts[name]
        if output.how == "apart":
            return list(parts)
        parts = [part.to(self._devices[0]) for part in parts]
        if output.how == "concatenated":
            return torch.cat(list(parts))
        dtype = parts[0].dtype
        exact = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
        if output.how == "summed":
            if not (dtype.is_floating_point or dtype.is_complex):
                return functools.reduce(torch.add, [part.to(torch.int64) for part in parts])  # as torch.sum does
            return functools.reduce(torch.add, [part.to(exact) for part in parts]).to(dtype)
        total = sum(self._num_examples)
        weighted = [part.to(exact) * (n / total) for part, n in zip(parts, self._num_examples, strict=True)]
        return functools.reduce(torch.add, weighted).to(dtype)
