"""Outputs of a step's replicas, other than the loss."""

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
from mirrorc.runtime.devices.events import reserve_for_caller
from mirrorc.torch_internals import has_symbols


@dataclass
class _Output:
    how: str
    types: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def like(self) -> torch.Tensor:
        return next(iter(self.types.values()))

    @property
    def sizes(self) -> dict[int, int]:
        return {replica: value.size(0) for replica, value in self.types.items()}


class StepOutputs:
    """Joins the replicas' outputs. On CPUs, replicas write their parts of concatenated outputs during the step."""

    def __init__(self, program: Program) -> None:
        self._devices = [device.torch_device for device in program.devices]
        self._num_examples = program.num_examples
        self._outputs: dict[str, _Output] = {}
        for replica, module in enumerate(program.device_graphs.values()):
            for node in calls_to(module.graph, ops.gather):
                output = self._outputs.setdefault(str(node.kwargs["output"]), _Output(str(node.kwargs["how"])))
                output.types[replica] = node.all_input_nodes[0].meta["val"]
        is_shared_memory = all(device.type == "cpu" for device in self._devices)
        self._written = {
            name
            for name, output in self._outputs.items()
            if is_shared_memory and output.how == "concatenated" and not any(map(has_symbols, output.types.values()))
        }
        self._wholes: dict[str, torch.Tensor] = {}
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        self._kept: list[list[torch.Tensor]] = []

    def begin(self) -> None:
        self._kept = [[] for _ in self._devices]
        for name, output in self._outputs.items():
            self._parts[name] = {}
            if name in self._written:
                like = output.like
                shape = (sum(output.sizes.values()), *like.shape[1:])
                self._wholes[name] = torch.empty(shape, dtype=like.dtype, device=self._devices[0])

    def part(self, replica: int, node: fx.Node) -> Callable[..., object]:
        name = str(node.kwargs["output"])
        if name not in self._written:

            def keep(value: torch.Tensor, **_: Any) -> None:
                self._parts[name][replica] = value.clone()  # its memory may be a shard's, or written again

            return keep
        sizes = self._outputs[name].sizes
        start, size = sum(size for other, size in sizes.items() if other < replica), sizes[replica]
        return lambda value, **_: self._wholes[name].narrow(0, start, size).copy_(value)

    def keeping(self, replica: int) -> Callable[..., None]:
        return lambda value, **_: self._kept[replica].append(value)

    def take_kept(self) -> list[list[torch.Tensor]]:
        """The values that each replica saves for backward, in the order of the graph."""
        kept, self._kept = self._kept, []
        return kept

    def take(self, num_examples: Sequence[int] = ()) -> dict[str, Any]:
        """Outputs by name. An output that is not combined is a list of the replicas' values."""
        for parts in self._parts.values():
            for part in parts.values():
                reserve_for_caller(part)
        with torch.no_grad():
            outputs = {
                name: self._together(name, output, num_examples or self._num_examples)
                for name, output in self._outputs.items()
            }
        self._wholes, self._parts = {}, {}
        return outputs

    def _together(self, name: str, output: _Output, num_examples: Sequence[int]) -> Any:
        if name in self._written:
            return self._wholes[name]
        replica_parts = [self._parts[name][replica] for replica in output.types]
        if output.how == "apart":
            return replica_parts
        parts = [part.to(self._devices[0]) for part in replica_parts]
        if output.how == "concatenated":
            return torch.cat(parts)
        dtype = parts[0].dtype
        exact = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
        if output.how == "summed":
            if not (dtype.is_floating_point or dtype.is_complex):
                return functools.reduce(torch.add, [part.to(torch.int64) for part in parts])  # as torch.sum does
            return functools.reduce(torch.add, [part.to(exact) for part in parts]).to(dtype)
        total = sum(num_examples)
        sizes = [num_examples[replica] for replica in output.types]
        weighted = [part.to(exact) * (n / total) for part, n in zip(parts, sizes, strict=True)]
        return functools.reduce(torch.add, weighted).to(dtype)
