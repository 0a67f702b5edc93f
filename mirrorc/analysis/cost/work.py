"""Estimated work of operators."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from mirrorc.custom_ops import out_products
from mirrorc.torch_internals import is_operator, num_bytes_now, size_now, with_sizes_now

_ATTENTION: dict[Any, tuple[int, float]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 2.0),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 5.0),
}
"""The index of the query argument, and the number of products of queries and keys. torch counts none."""
_PRODUCTS = (out_products.mm_into, out_products.linear_into, out_products.addmm_into)  # of the last two arguments


@dataclass(frozen=True)
class Machine:
    """A roofline model of a device."""

    seconds_per_multiplication: float
    seconds_per_byte: float


def seconds_of_graph(graph: fx.Graph, machine: Machine) -> float:
    return sum(seconds_of_operator(node, machine) for node in graph.nodes)


def seconds_of_operator(node: fx.Node, machine: Machine) -> float:
    """0 for a view, or a node without an operator."""
    if node.op != "call_function" or node.target is operator.getitem or not is_operator(node.target):
        return 0.0
    if getattr(node.target, "is_view", False):
        return 0.0
    moved = sum(_num_bytes(value.meta.get("val")) for value in (node, *node.all_input_nodes))
    return max(_num_multiplications(node) * machine.seconds_per_multiplication, moved * machine.seconds_per_byte)


def _num_multiplications(node: fx.Node) -> float:
    target: Any = node.target
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda source: _now(source.meta.get("val")))
    args, kwargs = operands
    if target in _PRODUCTS:
        left, right = args[-2:]
        return float(left.numel() * right.shape[-1])
    if target in _ATTENTION:
        first, factor = _ATTENTION[target]
        query, key = args[first : first + 2]
        return factor * float(query.numel() * key.shape[-2])
    count = flop_registry.get(getattr(target, "overloadpacket", None))
    if count is None:
        return 0.0
    return float(count(*args, **kwargs, out_val=_now(node.meta.get("val")))) / 2


def _now(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_now, value))
    return with_sizes_now(value) if isinstance(value, torch.Tensor) else size_now(value)


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return num_bytes_now(value)
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0
