"""Removes effect tokens and states of GPU generators from an export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx


@contextlib.contextmanager
def ordered_linalg_checks() -> Iterator[None]:
    """Registers checks of ``torch.linalg`` results as side effects, because torch 2.11 would drop them."""
    from torch._higher_order_ops import effects

    name = "aten::_linalg_check_errors"
    if effects._get_effect(name) is not None:
        yield
        return
    handle = effects._register_effectful_op(name, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def remove_effect_tokens(graph_module: fx.GraphModule) -> None:
    """Also turns checks of ``torch.linalg`` results into asserts."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._higher_order_ops.effects import with_effects

    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=with_effects):
        called: Any = node.args
        token, target, *args = called
        with graph.inserting_before(node):
            if target is torch.ops.aten._linalg_check_errors.default:
                _assert_is_computed(graph, node, args[0], str(args[1]))
                result = None
            else:
                result = graph.call_function(target, tuple(args), dict(node.kwargs))
                result.meta = {**node.meta, "val": _part(node.meta["val"], 1)}
        for user in list(node.users):
            user.replace_all_uses_with(token if user.args[1] == 0 else result)
            graph.erase_node(user)
        graph.erase_node(node)
    output = graph.output_node()
    results: Any = output.args[0]
    tokens = d.ForwardTokenAOTOutput | d.BackwardTokenAOTOutput
    plain = [pair for pair in zip(results, output.meta["desc"], strict=True) if not isinstance(pair[1], tokens)]
    output.args = (tuple(value for value, _ in plain),)
    output.meta["desc"] = [kind for _, kind in plain]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], d.ForwardTokenAOTInput | d.BackwardTokenAOTInput):
            graph.erase_node(node)


def _part(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list | tuple) and len(value) > index else None


def _assert_is_computed(graph: fx.Graph, like: fx.Node, info: fx.Node, name: str) -> None:
    aten = torch.ops.aten
    text = f"{name} failed: a matrix is singular, not positive definite, or has entries that are not finite"
    node, value = info, info.meta["val"]
    for target, constants in ((aten.ne.Scalar, (0,)), (aten.any.default, ()), (aten.logical_not.default, ())):
        node = graph.call_function(target, (node, *constants))  # Inductor has no aten.all
        with value.fake_mode:
            value = target(value, *constants)
        node.meta = {**like.meta, "val": value}
    graph.call_function(aten._assert_async.msg, (node, text)).meta = {**like.meta, "val": None}


@contextlib.contextmanager
def no_states_of_gpus() -> Iterator[None]:
    from torch._decomp.decompositions_for_rng import PhiloxState
    from torch._functorch import config

    def reset(self: Any) -> None:
        self.seed = self.base_offset = None
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    if config.functionalize_rng_ops:
        yield
        return
    with patch.object(PhiloxState, "reset", reset):
        yield
