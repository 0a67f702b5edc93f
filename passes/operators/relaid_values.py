"""Gives values of a graph new layouts."""

from __future__ import annotations

import torch
from torch import fx

from mirrorc.analysis.graph.layouts import may_read_memory_in_order, reads_strides, strides_of
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.operation import operation_of
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.torch_internals import add_node

aten = torch.ops.aten


class DependsOnStrides(Exception):
    """Raised if a node's result depends on the strides of its arguments; the text is the node's name."""


class RelaidValues:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.num_copies = 0
        self.changed: set[fx.Node] = set()
        self._was_contiguous: set[fx.Node] = set()  # the changed values that were contiguous
        self._restored: dict[fx.Node, fx.Node] = {}  # for changed values, their copies in the former layout

    def run(self) -> None:
        """Calls `change` on each node, and infers new types. Raises `DependsOnStrides`."""
        for node in list(self.graph.nodes):
            if reads_strides(node.target):
                raise DependsOnStrides(node.name)
            if may_read_memory_in_order(node.target) or operation_of(node.target) is not None:
                for operand in node.all_input_nodes:
                    if operand in self.changed:
                        node.replace_input_with(operand, self._as_before(node, operand))
            self.change(node)
            if is_compute(node) or (node.op == "call_function" and node.all_input_nodes):
                self.find_type(node)
        self.graph.lint()

    def change(self, node: fx.Node) -> None:
        raise NotImplementedError

    def copy(self, user: fx.Node, value: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        name = f"{value.name}_{str(memory_format).removeprefix('torch.').removesuffix('_format')}"
        with self.graph.inserting_before(user):
            copy = add_node(
                self.graph, "call_function", aten.clone.default, (value,), {"memory_format": memory_format}, name
            )
        copy.meta.update({key: user.meta[key] for key in user.meta if key != "val"})
        self.num_copies += 1
        self.changed.add(copy)
        self.find_type(copy)
        return copy

    def find_type(self, node: fx.Node) -> None:
        if node not in self.changed and not any(operand in self.changed for operand in node.all_input_nodes):
            return
        was = node.meta.get("val")
        try:
            reinfer_type(node)
        except TypeError as error:
            raise DependsOnStrides(node.name) from error
        if was is None or strides_of(node.meta["val"]) != strides_of(was):
            self.changed.add(node)
            if isinstance(was, torch.Tensor) and was.is_contiguous():
                self._was_contiguous.add(node)

    def _as_before(self, user: fx.Node, value: fx.Node) -> fx.Node:
        if value not in self._was_contiguous:
            raise DependsOnStrides(user.name)
        if value not in self._restored:
            self._restored[value] = self.copy(user, value, torch.contiguous_format)
            self.changed.discard(self._restored[value])
        return self._restored[value]
