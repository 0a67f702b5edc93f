"""Reads what a run of plain PyTorch returns beside its loss: containers, tensors, and values that are the same in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from mirrorc.capture.call.arguments import Structure
from mirrorc.capture.call.containers import take_apart, take_object_apart
from mirrorc.capture.call.outputs import is_same_constant
from mirrorc.capture.call.traced_outputs import IMMUTABLE, Leaf, LeafKind, TracedOutputs
from mirrorc.errors import MirrorcError
from mirrorc.torch_internals import storage_key

_LONGEST_PATH = 1000


class UnreadableOutputError(MirrorcError):
    """A run returns what a step cannot make again of what replicas give; the text is what follows the model's name."""


@dataclass(frozen=True)
class RunOutputs:
    """What one run returns beside its loss.

    Attributes:
        told: its containers, and what stands at their leaves.
        tensors: those of the run, by name, each in memory of its own and without a gradient.
    """

    told: TracedOutputs
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
    reader = _Reader(loss, arguments, variables)
    structure = reader.read(outputs, "outputs")
    marks = {storage_key(one) for one in marked}
    names = frozenset(name for name, value in reader.found.items() if storage_key(value) in marks)
    if marks - {storage_key(reader.found[name]) for name in names}:
        raise UnreadableOutputError(
            "computes something of a value that is marked by mirrorc.summed(), or does not return it. Remedy: mark what is "
            "returned, after everything that is computed of it"
        )
    taken = {storage_key(one) for one in (loss, *arguments)} | reader.memory
    tensors = {}
    for name, value in reader.found.items():
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


class _Reader:
    """Takes outputs apart.

    Attributes:
        leaves: what was found at the leaves.
        found: the tensors of the run among these, by name.
        memory: the storages of its variables.
    """

    def __init__(
        self, loss: torch.Tensor, arguments: Sequence[torch.Tensor], variables: Mapping[int, torch.Tensor]
    ) -> None:
        self.leaves: list[Leaf] = []
        self.found: dict[str, torch.Tensor] = {}
        self.memory = {storage_key(own) for own in variables.values()}
        self._loss, self._variables = loss, variables
        self._arguments = {id(argument): place for place, argument in enumerate(arguments)}

    def read(self, value: Any, path: str) -> Structure:
        """The structure of a value."""
        if isinstance(value, torch.Tensor):
            return self._leaf(path, *self._of_tensor(value, path))
        if isinstance(value, MethodType | nn.Module):
            self._refuse("a module or a method of one, of which each replica has its own,", path)
        if isinstance(value, FunctionType) and value.__closure__:
            self._refuse("a function that holds other values", path)
        if isinstance(value, (*IMMUTABLE, FunctionType, BuiltinFunctionType)):
            return self._leaf(path, LeafKind.CONSTANT, value)
        if len(path) > _LONGEST_PATH:
            self._refuse("a container that holds itself", path[:40] + "...")
        try:
            parts = take_apart(value, path) or take_object_apart(value, path)
        except TypeError:
            self._refuse(f"a {type(value).__qualname__}", path)
        return (parts.kind, parts.detail, tuple(self.read(child, where) for where, child in parts.children))

    def _leaf(self, path: str, kind: LeafKind, value: Any = None) -> Structure:
        self.leaves.append(Leaf(path, kind, value))
        return ("leaf", len(self.leaves) - 1)

    def _of_tensor(self, value: torch.Tensor, path: str) -> tuple[LeafKind, Any]:
        if value is self._loss:
            return LeafKind.LOSS, None
        if id(value) in self._arguments:
            return LeafKind.ARGUMENT, self._arguments[id(value)]
        if id(value) in self._variables:
            return LeafKind.CONSTANT, self._variables[id(value)]
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            self._refuse("a sparse, nested or quantized tensor", path)
        known = next((name for name, other in self.found.items() if other is value), None)
        if known is not None:
            return LeafKind.GATHERED, known
        while path in self.found:
            path += "_"
        self.found[path] = value
        return LeafKind.GATHERED, path

    def _refuse(self, found: str, path: str) -> NoReturn:
        raise UnreadableOutputError(
            f"returns {found}, as {path!r}, which a step cannot make again of what replicas give. Remedy: return the tensors in "
            "it, in a tuple, a dict or a dataclass; or compile without return_outputs"
        )
