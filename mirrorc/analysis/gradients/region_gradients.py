"""Gradients among the results of regions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to


def gradient_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Gradients and their variables, without gradients that are also other outputs."""
    output: Any = graph.output_node().args[0]
    names: dict[fx.Node, str] = {}
    shared: set[fx.Node] = {output["loss"], *output["writes"].values()}
    for name, node in output["gradients"].items():
        if node in names:
            shared.add(node)
        names[node] = name
    return {node: name for node, name in names.items() if node not in shared}


def calls_by_region(graphs: Sequence[fx.Graph]) -> dict[str, list[fx.Node]]:
    calls: dict[str, list[fx.Node]] = {}
    for graph in graphs:
        for node in calls_to(graph, ops.call_region):
            calls.setdefault(str(node.kwargs["region"]), []).append(node)
    return calls


def gradient_places(call: fx.Node, names: Mapping[fx.Node, str]) -> tuple[dict[int, str], list[str]]:
    """Variables of a call's gradients by result index, and variables whose gradients have other uses."""
    variables: dict[int, str] = {}
    left = []
    for part in call.users:
        if part.target is operator.getitem and part in names:
            if all(user.op == "output" for user in part.users):
                variables[part.args[1]] = names[part]  # type: ignore[index]
            else:
                left.append(names[part])
    return variables, left
