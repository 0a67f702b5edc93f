"""Reads in a trace what forward and the loss return: containers, and the tensors that the graph gives for them."""

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

from mirrorc.capture.call.arguments import Structure
from mirrorc.capture.call.containers import Parts, take_apart, take_object_apart
from mirrorc.errors import CaptureError
from mirrorc.torch_internals import StandIns, give_values, results_with_stand_ins, sizes_now, storage_key


@torch.compiler.allow_in_graph
def summed(value: torch.Tensor) -> torch.Tensor:
    """Marks an output of forward or of the loss: with ``return_outputs``, a step returns its sum over the replicas.

    Without the mark, a step returns the mean over examples of a scalar of floating point, and the replicas' numbers one by one
    of any other scalar. On its own, this is the identity, and so is its gradient. What is computed of a marked value is not
    marked, but for ``detach()``, conversions and other shapes.

    Args:
        value: such as a count, or a sum over the examples of a shard; of the same shape for shards of all sizes.

    Raises:
        TypeError: it is no tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"summed takes a tensor, not {type(value).__name__}: make one of it with torch.tensor")
    marked = getattr(_noted, "marked", None)
    if marked is None:
        return value.view_as(value)
    own = value.clone()  # in memory of its own, by which it is known
    marked.append(own)
    return own


_noted = threading.local()


@contextlib.contextmanager
def noted_marks() -> Iterator[list[torch.Tensor]]:
    """A block of plain PyTorch in this thread; gives what `summed` gives in it, each in memory of its own."""
    before, _noted.marked = getattr(_noted, "marked", None), []
    try:
        yield _noted.marked
    finally:
        _noted.marked = before


class LeafKind(enum.Enum):
    """What stands at a leaf of what is returned."""

    GATHERED = enum.auto()  # made of the replicas' parts
    LOSS = enum.auto()
    ARGUMENT = enum.auto()  # an argument of the call, which forward returns as it is
    CONSTANT = enum.auto()  # the same in every step


@dataclass(frozen=True)
class Leaf:
    """What stands at a leaf of the structure: ``value`` is a name, the index of an argument, or what does not change."""

    path: str
    kind: LeafKind
    value: Any = None


@dataclass(frozen=True)
class TracedOutputs:
    """What a traced call returns beside its loss.

    Attributes:
        structure: its containers.
        leaves: what they hold.
        types: shape and dtype of each tensor that the graph gives, by name, in the order of the graph's results.
        summed: the names of those that are marked by `summed`.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    types: Mapping[str, tuple[torch.Size, torch.dtype]]
    summed: frozenset[str]


def read_outputs(traced: fx.GraphModule, module: nn.Module, leaves: Sequence[torch.Tensor], what: str) -> TracedOutputs:
    """Reads what the forward of a training call returns; the graph then gives the loss and the tensors by themselves, detached.

    Args:
        traced: the trace of a `mirrorc.capture.call.training_call.TrainingCall` that keeps its outputs.
        module: what was traced.
        leaves: the tensors that it was traced with.
        what: the name of the model.

    Raises:
        CaptureError: it returns something that a step cannot make of what the replicas give; names it and the remedy.
    """
    try:
        results, stand_ins = results_with_stand_ins(traced, leaves)
        again, others = results_with_stand_ins(traced, leaves)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise CaptureError(
            f"{what} or its loss returns something that cannot be put together before its values are known, such as a Python "
            f"number or an array made of a tensor by .item(), float() or .numpy() ({error}). Remedy: return the tensor, and call "
            ".item() on what the step returns; or compile without return_outputs"
        ) from None
    reader = _Reader(stand_ins, others, (results[0], again[0]), leaves, module, what)
    structure = reader.read(results[1], again[1], "outputs")
    reader.refuse_hidden()
    marked = _marked(traced, reader.gathered, what)
    memory = memory_of_inputs(traced.graph)
    owned = [_own_value(traced, node, memory) for node in reader.gathered.values()]
    types = {
        name: (sizes_now(value.meta["example_value"]), value.meta["example_value"].dtype)
        for name, value in zip(reader.gathered, owned, strict=True)
    }
    loss = stand_ins.node_of(results[0])
    give_values(traced, [*([loss] if loss is not None else []), *owned])
    return TracedOutputs(structure, tuple(reader.leaves), types, marked)


def memory_of_inputs(graph: fx.Graph) -> set[int]:
    """The storages of a trace's arguments and variables: what lies there, AOTAutograd leaves out of its graph."""
    given = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    return {storage_key(value) for value in given if isinstance(value, torch.Tensor)}


def remove_marks(traced: fx.GraphModule) -> None:
    """Takes the calls of `summed` out of a graph."""
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


def _marked(traced: fx.GraphModule, gathered: Mapping[str, fx.Node], what: str) -> frozenset[str]:
    """The names of the outputs that are marked; refuses marks that would have no effect."""
    marks = set(traced.graph.find_nodes(op="call_function", target=summed))
    found = frozenset(name for name, node in gathered.items() if _behind_conversions(node) in marks)
    for name, node in gathered.items() if marks else ():
        if name not in found and not marks.isdisjoint(_sources(node)):
            raise CaptureError(
                f"{name!r}, which {what} or its loss returns, is computed of a value that is marked by mirrorc.summed(), and is "
                "no sum itself. Remedy: mark what is returned, after everything that is computed of it"
            )
    inner = [module for module in traced.modules() if module is not traced and isinstance(module, fx.GraphModule)]
    if any(module.graph.find_nodes(op="call_function", target=summed) for module in inner):
        raise CaptureError(
            f"{what} or its loss calls mirrorc.summed() in a function that is traced apart, such as one under "
            "torch.utils.checkpoint, where the mark is lost. Remedy: mark what that function returns"
        )
    return found


def _behind_conversions(node: fx.Node) -> fx.Node:
    while node.op == "call_method" and node.target in _KEEPS_MARK:
        node = node.all_input_nodes[0]
    return node


def _sources(node: fx.Node) -> set[fx.Node]:
    seen, waiting = {node}, [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return seen


def _own_value(traced: fx.GraphModule, node: fx.Node, memory: set[int]) -> fx.Node:
    """A value without gradient, copied if it lies in the memory of an input."""
    graph, value = traced.graph, node.meta["example_value"]
    with graph.inserting_before(graph.output_node()):
        own = graph.call_method("detach", (node,))
        own.meta = {**node.meta, "example_value": value.detach()}
        if storage_key(value) in memory:
            copy = graph.call_function(torch.clone, (own,))
            copy.meta, own = own.meta, copy
    return own


IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, frozenset, type, enum.Enum),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_OF_PYTHON = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


class _Reader:
    """Takes outputs apart. They are given twice, each time put together anew: what is the same object was there before.

    Attributes:
        leaves: what was found at the leaves.
        gathered: the graph's values among these, by name.
    """

    def __init__(
        self,
        stand_ins: StandIns,
        others: StandIns,
        losses: tuple[torch.Tensor, torch.Tensor],
        arguments: Sequence[torch.Tensor],
        module: nn.Module,
        what: str,
    ) -> None:
        self.leaves: list[Leaf] = []
        self.gathered: dict[str, fx.Node] = {}
        self._stand_ins, self._others, self._loss, self._what = stand_ins, others, losses[0], what
        self._arguments = {id(argument): i for i, argument in enumerate(arguments)}
        self._variables = [*module.parameters(), *module.buffers()]
        self._known = {id(tensor) for tensor in self._variables}
        self._memory = {storage_key(tensor) for tensor in (*arguments, *self._variables)}
        self._met = set(map(id, losses))

    def read(self, value: Any, again: Any, path: str) -> Structure:
        """The structure of a value."""
        if isinstance(value, torch.Tensor):
            self._met |= {id(value), id(again)}
            return self._leaf(path, *self._of_tensor(value, path))
        if isinstance(value, IMMUTABLE + _OF_PYTHON) or value is again:
            return self._leaf(path, LeafKind.CONSTANT, value)
        parts, others = self._parts(value, path), self._parts(again, path)
        children = zip(parts.children, others.children, strict=True)
        return (parts.kind, parts.detail, tuple(self.read(a, b, where) for (where, a), (_, b) in children))

    def refuse_hidden(self) -> None:
        """Refuses tensors in objects that cannot be looked into."""
        if any(stand_ins.any_held_beyond(self._met) for stand_ins in (self._stand_ins, self._others)):
            self._refuse("a tensor in an object that cannot be looked into (a function, an iterator, a set)", "outputs")

    def _leaf(self, path: str, kind: LeafKind, value: Any = None) -> Structure:
        self.leaves.append(Leaf(path, kind, value))
        return ("leaf", len(self.leaves) - 1)

    def _of_tensor(self, value: torch.Tensor, path: str) -> tuple[LeafKind, Any]:
        if value is self._loss:
            return LeafKind.LOSS, None
        if id(value) in self._arguments:
            return LeafKind.ARGUMENT, self._arguments[id(value)]
        node = self._stand_ins.node_of(value)
        if node is None:
            if id(value) not in self._known and storage_key(value) in self._memory:
                raise CaptureError(
                    f"{path!r}, which {self._what} or its loss returns, is a view of an argument, a parameter or a buffer that "
                    "no operator has made (.T, .mT, .data), so that a captured step would not make it anew. Remedy: return a "
                    "copy, with .clone()"
                )
            return LeafKind.CONSTANT, value
        known = next((name for name, other in self.gathered.items() if other is node), None)
        if known is None:
            while path in self.gathered:
                path += "_"
            self.gathered[path] = node
        return LeafKind.GATHERED, known or path

    def _parts(self, value: Any, path: str) -> Parts:
        try:
            parts = take_apart(value, path) or take_object_apart(value, path)
        except TypeError:
            self._refuse(f"a {type(value).__qualname__}", path)
        if len(path) > _LONGEST_PATH:
            self._refuse("a container that holds itself", path[:40] + "...")
        return parts

    def _refuse(self, found: str, path: str) -> NoReturn:
        raise CaptureError(
            f"{self._what} or its loss returns {found}, as {path!r}, which a step cannot make again of what the replicas give. "
            "Remedy: return the tensors in it, in a tuple, a dict or a dataclass; or compile without return_outputs"
        )


_LONGEST_PATH = 1000
