"""Gradients as results of regions: which they are, and which of them are matrix products or those of tables."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to


def gradient_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """The gradients that an outlined graph gives, each with its variable, but for those that are another result as well."""
    output: Any = graph.output_node().args[0]
    found: dict[fx.Node, str] = {}
    shared: set[fx.Node] = {output["loss"], *output["writes"].values()}
    for name, node in output["gradients"].items():
        if node in found:
            shared.add(node)
        found[node] = name
    return {node: name for node, name in found.items() if node not in shared}


def calls_by_region(graphs: Sequence[fx.Graph]) -> dict[str, list[fx.Node]]:
    """The calls of each region."""
    calls: dict[str, list[fx.Node]] = {}
    for graph in graphs:
        for node in calls_to(graph, ops.call_region):
            calls.setdefault(str(node.kwargs["region"]), []).append(node)
    return calls


def gradient_places(call: fx.Node, names: Mapping[fx.Node, str]) -> tuple[dict[int, str], list[str]]:
    """The results of a call that are gradients and nothing else: place to variable; and those that something else uses."""
    own: dict[int, str] = {}
    left = []
    for part in call.users:
        if part.target is operator.getitem and part in names:
            if all(user.op == "output" for user in part.users):
                own[part.args[1]] = names[part]  # type: ignore[index]
            else:
                left.append(names[part])
    return own, left


def matrix_product(gradient: fx.Node) -> fx.Node | None:
    """The product whose memory a gradient is, as it lies there, if nothing else uses it."""
    node = gradient
    while node.target in ops.VIEWS and len(node.users) == 1:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    if node.target is not torch.ops.aten.mm.default or len(node.users) != 1:
        return None
    value, product = gradient.meta["val"], node.meta["val"]
    is_same = value.shape == product.shape and value.is_contiguous() and product.is_contiguous()
    return node if is_same else None


def table_gradient(gradient: fx.Node) -> fx.Node | None:
    """The operator that makes a gradient of a table out of the rows that were looked up, if nothing else uses it."""
    is_one = gradient.target is torch.ops.aten.embedding_dense_backward.default and len(gradient.users) == 1
    return gradient if is_one and not gradient.args[4] and gradient.meta["val"].is_contiguous() else None
