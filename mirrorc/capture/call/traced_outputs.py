"""Reads the outputs of forward and loss in a trace."""

from __future__ import annotations

import contextlib
import enum
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from mirrorc.capture.call.call_arguments import Structure
from mirrorc.capture.call.containers import Parts, flatten_container, flatten_object
from mirrorc.errors import CaptureError, MirrorcError
from mirrorc.ir.nodes import ancestors
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import StandIns, give_values, results_with_stand_ins, size_now, sizes_now, storage_key


def summed(value: torch.Tensor) -> torch.Tensor:
    """Marks an output of forward or loss: a step with ``return_outputs`` returns its sum over the replicas.

    Without the mark, a step returns the mean over examples of a floating-point scalar, and a `PerReplica` of any other
    scalar. Only ``detach()``, conversions and reshapes keep the mark.

    Args:
        value: a tensor, such as a count or sum over a shard's examples. Its shape must not depend on the number of
            examples.

    Raises:
        TypeError: the value is not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"MC1701: summed takes a tensor, not {type(value).__name__}: make one of it with torch.tensor")
    if torch.compiler.is_dynamo_compiling():  # in a graph of the user's own; ours has `summed` as one call
        return value.view_as(value)
    marked = getattr(_noted, "marked", None)
    if marked is None:
        return value.view_as(value)
    copy = value.clone()  # the memory of a copy identifies it
    marked.append(copy)
    return copy


_noted = threading.local()


@contextlib.contextmanager
def noted_marks() -> Iterator[list[torch.Tensor]]:
    """Collects this thread's results of `summed` while plain PyTorch runs."""
    before, _noted.marked = getattr(_noted, "marked", None), []
    try:
        yield _noted.marked
    finally:
        _noted.marked = before


class LeafKind(enum.Enum):
    GATHERED = enum.auto()  # combined from the replicas' values
    LOSS = enum.auto()
    ARGUMENT = enum.auto()  # an argument of the call, which forward returns as it is
    CONSTANT = enum.auto()  # the same in every step


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of an output: ``value`` is the name of a gathered value, the index of an argument, or a constant."""

    path: str
    kind: LeafKind
    value: Any = None


@dataclass(frozen=True)
class TracedOutputs:
    """The outputs of a traced call other than its loss; ``types`` has the order of the graph's results."""

    structure: Structure
    leaves: tuple[OutputLeaf, ...]
    types: Mapping[str, tuple[torch.Size, torch.dtype]]
    summed: frozenset[str]


class ShapeOfValuesError(Exception):
    """The shape of an output depends on values. The text is the user's source line."""


def read_outputs(
    traced: fx.GraphModule, module: nn.Module, leaves: Sequence[torch.Tensor], model_name: str
) -> TracedOutputs:
    """Reads a trace's outputs. The graph then returns the loss and the detached output tensors."""
    try:
        results, stand_ins = results_with_stand_ins(traced, leaves)
        again, others = results_with_stand_ins(traced, leaves)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise problem(
            CaptureError,
            f"MC2401: {model_name} or its loss returns something that is no tensor, made of a tensor's values",
            f"it cannot be put together before its values are known: {error}",
            ("return the tensor, and call .item() on what the call returns", "leave return_outputs= out"),
        ) from None
    reader = _TraceReader(stand_ins, others, (results[0], again[0]), leaves, module)
    try:
        structure = reader.read(results[1], again[1], "outputs")
        reader.refuse_hidden()
    except UnreadableOutputError as error:
        raise CaptureError(str(error)) from None
    marked = _marked(traced, reader.gathered, model_name)
    memory = memory_of_inputs(traced.graph)
    detached = [_detached_copy(traced, node, memory) for node in reader.gathered.values()]
    types = {name: _type_of(node) for name, node in zip(reader.gathered, detached, strict=True)}
    loss = stand_ins.node_of(results[0])
    give_values(traced, [*([loss] if loss is not None else []), *detached])
    return TracedOutputs(structure, tuple(reader.leaves), types, marked)


def _type_of(output: fx.Node) -> tuple[torch.Size, torch.dtype]:
    value = output.meta["example_value"]
    if any(size_now(size) is None for size in value.shape):
        raise ShapeOfValuesError(source_line(output.all_input_nodes[0]))
    return sizes_now(value), value.dtype


def memory_of_inputs(graph: fx.Graph) -> set[int]:
    """Storage keys of a trace's inputs. AOTAutograd drops outputs that alias an input."""
    inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    return {storage_key(value) for value in inputs if isinstance(value, torch.Tensor)}


def remove_marks(traced: fx.GraphModule) -> None:
    for node in list(traced.graph.find_nodes(op="call_function", target=summed)):
        node.replace_all_uses_with(node.all_input_nodes[0])
        traced.graph.erase_node(node)
    traced.recompile()


_KEEPS_MARK = frozenset(
    (
        *("detach", "clone", "contiguous", "cpu", "view", "reshape", "squeeze", "unsqueeze", "flatten"),
        *("to", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short"),
    )
)


def _marked(traced: fx.GraphModule, gathered: Mapping[str, fx.Node], model_name: str) -> frozenset[str]:
    marks = set(traced.graph.find_nodes(op="call_function", target=summed))
    names = frozenset(name for name, node in gathered.items() if _behind_conversions(node) in marks)
    for name, node in gathered.items() if marks else ():
        if name not in names and not marks.isdisjoint(ancestors(node)):
            raise problem(
                CaptureError,
                f"MC2402: {name!r}, which {model_name} or its loss returns, is computed from a summed() value",
                "what is marked is summed over replicas, and not what follows from it",
                (
                    "mirrorc.summed(...) around what is returned",
                    "for a ratio, return its two sums, and divide after the call",
                ),
            )
    inner = [module for module in traced.modules() if module is not traced and isinstance(module, fx.GraphModule)]
    if any(module.graph.find_nodes(op="call_function", target=summed) for module in inner):
        raise problem(
            CaptureError,
            f"MC2402: {model_name} or its loss calls mirrorc.summed() in a function that is traced apart",
            "the mark is lost, as under torch.utils.checkpoint",
            "mirrorc.summed(...) around what that function returns",
        )
    return names


def _behind_conversions(node: fx.Node) -> fx.Node:
    while node.op == "call_method" and node.target in _KEEPS_MARK:
        node = node.all_input_nodes[0]
    return node


def _detached_copy(traced: fx.GraphModule, node: fx.Node, memory: set[int]) -> fx.Node:
    graph, value = traced.graph, node.meta["example_value"]
    with graph.inserting_before(graph.output_node()):
        detached = graph.call_method("detach", (node,))
        detached.meta = {**node.meta, "example_value": value.detach()}
        if storage_key(value) not in memory:
            return detached
        copy = graph.call_function(torch.clone, (detached,))
    copy.meta = detached.meta
    return copy


IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, frozenset, type, enum.Enum),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_OF_PYTHON = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


class UnreadableOutputError(MirrorcError):
    """Raised for an output that a step cannot rebuild."""


class OutputReader:
    """Flattens outputs to a structure and its leaves; ``gathered`` has the leaves that replicas compute, by name."""

    def __init__(self, loss: torch.Tensor, arguments: Sequence[torch.Tensor]) -> None:
        self.leaves: list[OutputLeaf] = []
        self.gathered: dict[str, Any] = {}
        self._loss = loss
        self._arguments = {id(argument): i for i, argument in enumerate(arguments)}

    def leaf(self, path: str, kind: LeafKind, value: Any = None) -> Structure:
        self.leaves.append(OutputLeaf(path, kind, value))
        return ("leaf", len(self.leaves) - 1)

    def tensor_leaf(self, tensor: torch.Tensor, path: str) -> Structure:
        if tensor is self._loss:
            return self.leaf(path, LeafKind.LOSS)
        if id(tensor) in self._arguments:
            return self.leaf(path, LeafKind.ARGUMENT, self._arguments[id(tensor)])
        kind, value = self.source_of(tensor, path)
        if kind is LeafKind.CONSTANT:
            return self.leaf(path, kind, value)
        name = next((name for name, other in self.gathered.items() if other is value), path)
        while self.gathered.get(name, value) is not value:
            name += "_"
        self.gathered[name] = value
        return self.leaf(path, kind, name)

    def source_of(self, tensor: torch.Tensor, path: str) -> tuple[LeafKind, Any]:
        """A leaf's kind and value: CONSTANT and a tensor, or GATHERED and an entry for ``gathered``."""
        raise NotImplementedError

    def parts(self, value: Any, path: str) -> Parts:
        """Raises an error for an object that contains itself or cannot be rebuilt."""
        if len(path) > _LONGEST_PATH:
            self.refuse("a container that holds itself", path[:40] + "...")
        try:
            return flatten_container(value, path) or flatten_object(value, path)
        except TypeError:
            self.refuse(f"a {type(value).__qualname__}", path)

    def refuse(self, kind: str, path: str) -> NoReturn:
        raise problem(
            UnreadableOutputError,
            f"MC2401: forward or loss returns {kind}, as {path!r}",
            "it cannot be put together from what the replicas return",
            ("return the tensors in it, in a tuple, a dict or a dataclass", "leave return_outputs= out"),
        )


_LONGEST_PATH = 1000


class _TraceReader(OutputReader):
    """Compares two builds of a trace's outputs. An object in both existed before the trace."""

    gathered: dict[str, fx.Node]

    def __init__(
        self,
        stand_ins: StandIns,
        others: StandIns,
        losses: tuple[torch.Tensor, torch.Tensor],
        arguments: Sequence[torch.Tensor],
        module: nn.Module,
    ) -> None:
        super().__init__(losses[0], arguments)
        self._stand_ins, self._others = stand_ins, others
        variables = [*module.parameters(), *module.buffers()]
        self._known = set(map(id, variables))
        self._memory = {storage_key(tensor) for tensor in (*arguments, *variables)}
        self._variables = variables  # alive, so that no other tensor has their id
        self._visited = set(map(id, losses))

    def read(self, value: Any, again: Any, path: str) -> Structure:
        if isinstance(value, torch.Tensor):
            self._visited |= {id(value), id(again)}
            return self.tensor_leaf(value, path)
        if isinstance(value, IMMUTABLE + _OF_PYTHON) or value is again:
            return self.leaf(path, LeafKind.CONSTANT, value)
        parts, others = self.parts(value, path), self.parts(again, path)
        children = zip(parts.children, others.children, strict=True)
        return (parts.kind, parts.detail, tuple(self.read(a, b, where) for (where, a), (_, b) in children))

    def source_of(self, tensor: torch.Tensor, path: str) -> tuple[LeafKind, Any]:
        node = self._stand_ins.node_of(tensor)
        if node is not None:
            return LeafKind.GATHERED, node
        if id(tensor) not in self._known and storage_key(tensor) in self._memory:
            raise problem(
                UnreadableOutputError,
                f"MC2401: forward or loss returns {path!r}, a view (.T, .mT, .data) of an argument, a parameter or a buffer",
                "no operator has made it, and a captured graph would not make it anew",
                "return a copy, with .clone()",
            )
        return LeafKind.CONSTANT, tensor

    def refuse_hidden(self) -> None:
        if any(stand_ins.any_held_beyond(self._visited) for stand_ins in (self._stand_ins, self._others)):
            self.refuse("a tensor in an object that cannot be looked into (a function, an iterator, a set)", "outputs")
