"""How convolutions' tensors lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import is_compute

aten = torch.ops.aten

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # oneDNN's
_OF_TORCH = ("aten", "prims")
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_READ_STRIDES = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.view.dtype,
)


def laid_channels_last(graph: fx.Graph) -> tuple[fx.Graph, str]:
    """Gives two-dimensional convolutions their inputs and weights in channels-last format, forward and backward.

    What they make has that format then, and so has, up to what changes the shape, all that is made of it: the types of values
    are found anew. Parameters stay as they are: a step copies the weights, which is little to copy, and their gradients.
    Operators that are not torch's own get their arguments as they lay before: they may draw random numbers in the order of
    memory, or have been written for one format.

    Source: torch's own compiler lays convolutions on CPUs in this way, when it compiles; here graphs are cut into regions, each
        compiled by itself, so that the format must be in the graph before.

    Args:
        graph: a captured graph of functional operators.

    Returns:
        A graph, and a remark on why it is the old one; empty if it was laid out, or has nothing to be.
    """
    if not any(_is_convolution(node) for node in graph.nodes):
        return graph, ""
    layout = _Layout(copied(graph))
    try:
        layout.run()
    except _DependsOnStrides as found:
        return graph, f"convolutions are not laid channels-last: {found} depends on how values lie in memory"
    return layout.graph, ""


class _DependsOnStrides(Exception):
    """Raised where values must lie as they do."""


def _is_convolution(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    values = [given.meta["val"] for given in node.args[:2]]  # type: ignore[union-attr]
    return all(value.dim() == 4 and value.dtype in _DTYPES for value in values)


class _Layout:
    """Walks a graph once; each value has its type before what uses it is looked at."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.mode = next(node for node in graph.nodes if _is_convolution(node)).meta["val"].fake_mode
        self.laid: dict[fx.Node, fx.Node] = {}  # a value, and its copy in channels-last format
        self.changed: set[fx.Node] = set()  # values that lie in another way than before
        self.was_contiguous: set[fx.Node] = set()  # those of them that were contiguous
        self.restored: dict[fx.Node, fx.Node] = {}  # and copies that are again

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.target in _READ_STRIDES:
                raise _DependsOnStrides(node.name)
            if is_compute(node) and node.target.namespace not in _OF_TORCH:
                for given in self.changed.intersection(node.all_input_nodes):
                    node.replace_input_with(given, self._restored(node, given))
            if _is_convolution(node):
                node.args = (*(self._channels_last(node, given) for given in node.args[:2]), *node.args[2:])
            elif node.target is aten.convolution_backward.default:
                own = (self.laid.get(given, given) for given in node.args[1:3])
                node.args = (node.args[0], *own, *node.args[3:])
            if is_compute(node) or (node.op == "call_function" and node.all_input_nodes):
                self._find_type(node)
        self.graph.lint()

    def _channels_last(self, convolution: fx.Node, given: Any) -> fx.Node:
        if given.meta["val"].is_contiguous(memory_format=torch.channels_last):
            return given
        if given not in self.laid:
            self.laid[given] = self._copy(convolution, given, torch.channels_last)
        return self.laid[given]

    def _restored(self, user: fx.Node, given: fx.Node) -> fx.Node:
        if given not in self.was_contiguous:
            raise _DependsOnStrides(user.name)
        if given not in self.restored:
            self.restored[given] = self._copy(user, given, torch.contiguous_format)
            self.changed.discard(self.restored[given])
        return self.restored[given]

    def _copy(self, user: fx.Node, given: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        with self.graph.inserting_before(user):
            copy = self.graph.call_function(aten.clone.default, (given,), {"memory_format": memory_format})
        copy.meta = {key: user.meta[key] for key in user.meta if key != "val"}
        self.changed.add(copy)
        self._find_type(copy)
        return copy

    def _find_type(self, node: fx.Node) -> None:
        if node not in self.changed and not any(given in self.changed for given in node.all_input_nodes):
            return
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda given: given.meta["val"])
        with self.mode, torch.no_grad():
            try:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, ValueError) as error:
                if node.target not in _VIEWS:
                    raise _DependsOnStrides(node.name) from error
                node.target = aten.reshape.default  # elements that no longer lie as the view needs them are copied
                value = node.target(*args)
        if "val" not in node.meta or _strides(value) != _strides(node.meta["val"]):
            self.changed.add(node)
            if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_contiguous():
                self.was_contiguous.add(node)
        node.meta["val"] = value


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    return [_strides(part) for part in value] if isinstance(value, list | tuple) else None
