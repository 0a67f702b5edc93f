"""Reads the outputs of a run of plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.call_arguments import Structure
from mirrorc.capture.call.step_outputs import is_same_constant
from mirrorc.capture.call.traced_outputs import IMMUTABLE, LeafKind, OutputReader, TracedOutputs, UnreadableOutputError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import storage_key


@dataclass(frozen=True)
class RunOutputs:
    """The outputs of one run other than its loss. The tensors own their memory and have no gradient."""

    record: TracedOutputs
    tensors: Mapping[str, torch.Tensor]


def read_run(
    outputs: Any,
    loss: torch.Tensor,
    arguments: Sequence[torch.Tensor],
    variables: Mapping[int, torch.Tensor],
    marked: Sequence[torch.Tensor],
) -> tuple[RunOutputs, Mapping[str, torch.Tensor]]:
    """Also returns the outputs of forward themselves.

    Args:
        variables: the user's variables, by the ids of the run's variables.
    """
    reader = _RunReader(loss, arguments, variables)
    structure = reader.read(outputs, "outputs")
    marks = {storage_key(tensor) for tensor in marked}
    names = frozenset(name for name, value in reader.gathered.items() if storage_key(value) in marks)
    if marks - {storage_key(reader.gathered[name]) for name in names}:
        raise problem(
            UnreadableOutputError,
            "MC2402: something is computed of a value that is marked by mirrorc.summed(), or it is not returned",
            fix="return loss, mirrorc.summed(value), and compute nothing of it after the mark",
        )
    taken = {storage_key(tensor) for tensor in (loss, *arguments)} | reader.memory
    tensors = {}
    for name, value in reader.gathered.items():
        detached = value.detach().contiguous()
        tensors[name] = detached.clone() if storage_key(detached) in taken else detached
        taken.add(storage_key(tensors[name]))
    types = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    return RunOutputs(TracedOutputs(structure, tuple(reader.leaves), types, names), tensors), reader.gathered


def difference(outputs: TracedOutputs, recorded: TracedOutputs) -> str:
    """The path of the first output that differs between two runs on shards of equal shapes; empty if none does."""
    for leaf, other in zip(outputs.leaves, recorded.leaves, strict=False):
        is_other_value = leaf.kind is not LeafKind.CONSTANT and leaf.value != other.value
        if leaf.path != other.path or leaf.kind is not other.kind or is_other_value:
            return leaf.path
        if leaf.kind is LeafKind.CONSTANT and not is_same_constant(leaf.value, other.value):
            return leaf.path
    longer = max(outputs.leaves, recorded.leaves, key=len)
    shorter = min(outputs.leaves, recorded.leaves, key=len)
    if len(longer) > len(shorter):
        return longer[len(shorter)].path
    names = [name for name in outputs.types if outputs.types[name] != recorded.types.get(name)]
    if names or outputs.summed != recorded.summed:
        return names[0] if names else min(outputs.summed ^ recorded.summed)
    return "" if outputs.structure == recorded.structure else "outputs"


class _RunReader(OutputReader):
    gathered: dict[str, torch.Tensor]

    def __init__(
        self, loss: torch.Tensor, arguments: Sequence[torch.Tensor], variables: Mapping[int, torch.Tensor]
    ) -> None:
        super().__init__(loss, arguments)
        self.memory = {storage_key(variable) for variable in variables.values()}
        self._variables = variables

    def read(self, value: Any, path: str) -> Structure:
        if isinstance(value, torch.Tensor):
            return self.tensor_leaf(value, path)
        if isinstance(value, MethodType | nn.Module):
            self.refuse("a module or a method of one, of which each replica has its own,", path)
        if isinstance(value, FunctionType) and value.__closure__:
            self.refuse("a function that holds other values", path)
        if isinstance(value, (*IMMUTABLE, FunctionType, BuiltinFunctionType)):
            return self.leaf(path, LeafKind.CONSTANT, value)
        parts = self.parts(value, path)
        return (parts.kind, parts.detail, tuple(self.read(child, where) for where, child in parts.children))

    def source_of(self, tensor: torch.Tensor, path: str) -> tuple[LeafKind, Any]:
        if id(tensor) in self._variables:
            return LeafKind.CONSTANT, self._variables[id(tensor)]
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            self.refuse("a sparse, nested or quantized tensor", path)
        return LeafKind.GATHERED, tensor
