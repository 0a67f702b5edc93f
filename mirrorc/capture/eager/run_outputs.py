"""Reads what a run of plain PyTorch returns beside its loss: containers, tensors, and values that are the same in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.arguments import Structure
from mirrorc.capture.call.outputs import is_same_constant
from mirrorc.capture.call.traced_outputs import IMMUTABLE, LeafKind, OutputReader, TracedOutputs, UnreadableOutputError
from mirrorc.torch_internals import storage_key


@dataclass(frozen=True)
class RunOutputs:
    """What one run returns beside its loss.

    Attributes:
        record: its containers, and what stands at their leaves.
        tensors: those of the run, by name, each in memory of its own and without a gradient.
    """

    record: TracedOutputs
    tensors: Mapping[str, torch.Tensor]


def read_run(
    outputs: Any,
    loss: torch.Tensor,
    arguments: Sequence[torch.Tensor],
    variables: Mapping[int, torch.Tensor],
    marked: Sequence[torch.Tensor],
) -> RunOutputs:
    """Reads what the forward of a run returns.

    Args:
        outputs: what it returns.
        loss: of the run, which may stand among its outputs.
        arguments: the tensors that it was given.
        variables: the user's parameters and buffers, by the ids of those that it was given in their places.
        marked: what `mirrorc.summed` has given in the run.

    Raises:
        UnreadableOutputError: it returns something that a step cannot make again.
    """
    reader = _RunReader(loss, arguments, variables)
    structure = reader.read(outputs, "outputs")
    marks = {storage_key(one) for one in marked}
    names = frozenset(name for name, value in reader.gathered.items() if storage_key(value) in marks)
    if marks - {storage_key(reader.gathered[name]) for name in names}:
        raise UnreadableOutputError(
            "computes something of a value that is marked by mirrorc.summed(), or does not return it. Remedy: mark what is "
            "returned, after everything that is computed of it"
        )
    taken = {storage_key(one) for one in (loss, *arguments)} | reader.memory
    tensors = {}
    for name, value in reader.gathered.items():
        own = value.detach().contiguous()
        tensors[name] = own.clone() if storage_key(own) in taken else own
        taken.add(storage_key(tensors[name]))
    types = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    return RunOutputs(TracedOutputs(structure, tuple(reader.leaves), types, names), tensors)


def difference(found: TracedOutputs, recorded: TracedOutputs) -> str:
    """The name of the first output in which two runs on shards of one shape differ; empty if they are alike.

    They may differ in the values of tensors alone.
    """
    for one, other in zip(found.leaves, recorded.leaves, strict=False):
        is_other_value = one.kind is not LeafKind.CONSTANT and one.value != other.value
        if one.path != other.path or one.kind is not other.kind or is_other_value:
            return one.path
        if one.kind is LeafKind.CONSTANT and not is_same_constant(one.value, other.value):
            return one.path
    longer = max(found.leaves, recorded.leaves, key=len)
    shorter = min(found.leaves, recorded.leaves, key=len)
    if len(longer) > len(shorter):
        return longer[len(shorter)].path
    names = [name for name in found.types if found.types[name] != recorded.types.get(name)]
    if names or found.summed != recorded.summed:
        return names[0] if names else min(found.summed ^ recorded.summed)
    return "" if found.structure == recorded.structure else "outputs"


class _RunReader(OutputReader):
    """Reads the outputs of a run.

    Attributes:
        memory: the storages of its variables.
    """

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
