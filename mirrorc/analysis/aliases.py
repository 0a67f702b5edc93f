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


class ViewedVariables:
    """Finds the variables whose memory values outside of regions may share.

    Args:
        program: the program of the values; its graphs do not change while this is in use.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._given: dict[str, dict[int, int]] = {}

    def of(self, value: fx.Node) -> str | None:
        """The variable whose memory a value may share, as a read, a view or a region's result may; None if there is none."""
        while True:
            value = viewed(value)
            if value.target is ops.read:
                return str(value.kwargs["variable"])
            call = value.args[0] if value.target is operator.getitem else None
            if not isinstance(call, fx.Node) or not is_region_call(call):
                return None
            place: Any = value.args[1]
            given = self._arguments_viewed(region_of(call)).get(place)
            source = call.args[given] if given is not None else None
            if not isinstance(source, fx.Node):
                return None
            value = source

    def _arguments_viewed(self, region: str) -> dict[int, int]:
        """The arguments of a region whose memory its results may share: places of arguments by places of results."""
        if region not in self._given:
            body = self._program.regions[region].graph_module.graph
            results: Any = body.output_node().args[0]
            placeholders = {node: i for i, node in enumerate(body.find_nodes(op="placeholder"))}
            roots = ((i, viewed(result)) for i, result in enumerate(results) if isinstance(result, fx.Node))
            self._given[region] = {i: placeholders[root] for i, root in roots if root in placeholders}
        return self._given[region]
