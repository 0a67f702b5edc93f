"""Replaces the random operations of a captured graph by functions of a seed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mirrorc.custom_ops.random import _LIBRARY, _draw_mask, _fake_mask, seeded


def seed_random_ops(graph: fx.Graph, seed: fx.Node) -> int:
    """Replaces every random operation of a graph by one that draws from a stream of ``seed``.

    Dropout becomes a mask and a product. Every other random operation of ATen becomes an operator of the same schema
    that runs it under the seed.

    Returns:
        How many random operations there were.
    """
    stream = 0
    for node in list(graph.nodes):
        if not is_random(node):
            continue
        with graph.inserting_before(node):
            if node.target is torch.ops.aten.native_dropout.default:
                _replace_dropout(graph, node, seed, stream)
            else:
                _replace_by_seeded(graph, node, seed, stream)
        stream += 1
    return stream


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace == "mirrorc" or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is torch.ops.aten.native_dropout.default:
        return True
    values = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    dropout = next((a for a in node.target._schema.arguments if a.name == "dropout_p"), None)
    return dropout is None or bool(values.get("dropout_p", dropout.default_value) != 0.0)


def _replace_dropout(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int) -> None:
    source, p = node.args[0], node.args[1]
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    assert isinstance(source, fx.Node) and isinstance(p, int | float)
    value = source.meta["val"]
    keep = 1.0 - p if train is not False else 1.0
    mask = _insert(
        graph, node, torch.ops.mirrorc.seeded_mask.default, (seed, stream, list(value.shape), keep, value.device)
    )
    mask.meta["val"] = node.meta["val"][1]
    scale = 1.0 / keep if keep > 0.0 else 0.0
    masked = _insert(graph, node, torch.ops.aten.mul.Tensor, (source, mask))
    masked.meta["val"] = node.meta["val"][0]
    scaled = _insert(graph, node, torch.ops.aten.mul.Tensor, (masked, scale))
    scaled.meta["val"] = node.meta["val"][0]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((scaled, mask)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _replace_by_seeded(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int) -> None:
    kwargs = {key: value for key, value in node.kwargs.items() if key != "generator"}
    new = _insert(graph, node, seeded(node.target), (seed, stream, *node.args), kwargs)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _insert(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


_LIBRARY.define(
    "seeded_mask(Tensor seed, int stream, SymInt[] size, float keep_probability, Device device) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("seeded_mask", _draw_mask, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::seeded_mask", _fake_mask, lib=_LIBRARY)
