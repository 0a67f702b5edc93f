"""Replaces the random operations of a captured graph by functions of a seed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.layouts import may_read_memory_in_order, reads_strides, strides_of
from mirrorc.custom_ops.random import seeded
from mirrorc.errors import CaptureError
from mirrorc.ir.nodes import CHECKPOINT
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import is_operator, raw_sizes_allowed, schema_of

aten = torch.ops.aten


def seed_random_ops(graph: fx.Graph, seed: fx.Node) -> int:
    """Makes each random operation draw from its own stream of ``seed``; returns the number of operations.

    Dropout becomes the product with a drawn mask. An operator that takes the seed runs any other operation.
    """
    stream = 0
    for node in list(graph.nodes):
        if not is_random(node):
            continue
        with graph.inserting_before(node):
            if node.target is aten.native_dropout.default:
                _replace_dropout(graph, node, seed, stream)
            else:
                kwargs = {key: value for key, value in node.kwargs.items() if key != "generator"}
                new = _insert(graph, node, seeded(node.target), (seed, stream, *node.args), kwargs)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
        stream += 1
    return stream


def is_random(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not is_operator(target):
        return False
    if target.namespace == "mirrorc" or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return target is aten.native_dropout.default or draws_now(target, node.args, node.kwargs)


def draws_now(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention without dropout draws no random numbers."""
    arguments = schema_of(operator).arguments
    values = {a.name: v for a, v in zip(arguments, args, strict=False)} | dict(kwargs)
    dropout = next((a for a in arguments if a.name == "dropout_p"), None)
    return dropout is None or bool(values.get("dropout_p", dropout.default_value) != 0.0)


def _replace_dropout(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int) -> None:
    source, p = node.args[0], node.args[1]
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    assert isinstance(source, fx.Node) and isinstance(p, int | float)
    keep = 1.0 - p if train is not False else 1.0
    mask = _draw(graph, node, seed, stream, keep)
    scale = 1.0 / keep if keep > 0.0 else 0.0
    masked = _insert(graph, node, aten.mul.Tensor, (source, mask))
    scaled = _insert(graph, node, aten.mul.Tensor, (masked, scale))
    results, noted = (scaled, mask), node.meta["val"]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
    both = zip(results, noted, strict=True)
    _follow(graph, {new for new, was in both if strides_of(new.meta["val"]) != was.stride()})


def _draw(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int, keep: float) -> fx.Node:
    """The mask has the strides of dropout's own mask."""
    noted = node.meta["val"][1]
    order = list(range(noted.dim()))  # of dimensions, from the outermost one in memory
    if not noted.is_contiguous():
        order.sort(key=lambda dim: -noted.stride(dim))
    size = [noted.shape[dim] for dim in order]
    mask = _insert(graph, node, torch.ops.mirrorc.seeded_mask.default, (seed, stream, size, keep, noted.device))
    if order == sorted(order):
        return mask
    return _insert(graph, node, aten.permute.default, (mask, [order.index(dim) for dim in range(noted.dim())]))


def _follow(graph: fx.Graph, changed: set[fx.Node]) -> None:
    if not changed:
        return
    for node in graph.nodes:
        if node in changed or node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        was = strides_of(node.meta["val"])
        try:
            if reads_strides(node.target) or may_read_memory_in_order(node.target):
                raise TypeError("it may address elements by their position in memory")
            reinfer_type(node)
        except TypeError as error:
            raise problem(
                CaptureError,
                f"MC2508: {node.target} takes what dropout gives in a layout that cannot be kept",
                str(error),
                "call .contiguous() on what dropout gets",
                at=source_line(node) or node.name,
            ) from None
        if strides_of(node.meta["val"]) != was:
            changed.add(node)


def _insert(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    with raw_sizes_allowed():
        node = graph.call_function(target, args, kwargs or {})
    reinfer_type(node)
    for key in ("stack_trace", "nn_module_stack", CHECKPOINT):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node
