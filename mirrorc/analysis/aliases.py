"""Finds which values may share memory with one another."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.ir.program import Program


def is_view(node: fx.Node) -> bool:
    """Whether a node is an operator of torch whose result may share the memory of its first argument."""
    if not is_compute(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    aliases = any(result.alias_info is not None for result in schema.returns)
    return aliases or node.target is torch.ops.aten.reshape.default


def viewed(node: fx.Node) -> fx.Node:
    """Follows views back to the value of the same graph whose memory they may share; a value that is no view is itself."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def viewed_variable(program: Program, value: fx.Node) -> str | None:
    """The variable whose memory a value outside of regions may share, because it is a read, a view or a region's result.

    None if there is no such variable.
    """
    value = viewed(value)
    if value.target is ops.read:
        return str(value.kwargs["variable"])
    call = value.args[0] if value.target is operator.getitem else None
    if not isinstance(call, fx.Node) or not is_region_call(call):
        return None
    body = program.regions[region_of(call)].graph_module.graph
    results: Any = body.output_node().args[0]
    inside = viewed(results[value.args[1]])
    if inside.op != "placeholder":
        return None
    placeholders = (node for node in body.nodes if node.op == "placeholder")
    given = call.args[next(place for place, node in enumerate(placeholders) if node is inside)]
    return viewed_variable(program, given) if isinstance(given, fx.Node) else None
