"""Finds arguments whose dim 0 is the time of a recurrent layer, because a step would split it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mirrorc.capture.call.call_arguments import Leaf
from mirrorc.custom_ops.recurrent import recurrent
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import leaf_of_placeholder

_KEEPS_FIRST_DIM = {
    F.embedding, F.linear, F.dropout, F.layer_norm, F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, torch.relu, torch.tanh,
    torch.sigmoid, torch.mul, torch.add, torch.sub, torch.div, torch.clone, operator.mul, operator.add, operator.sub,
    operator.truediv, operator.neg,
}  # fmt: skip
_METHODS = {
    "relu", "tanh", "sigmoid", "mul", "add", "sub", "div", "to", "float", "double", "half", "bfloat16", "type", "contiguous",
    "clone", "detach", "masked_fill",
}  # fmt: skip


def leaves_with_time_first(graph: fx.Graph) -> tuple[int, ...]:
    origins = dict.fromkeys(_origin(node.args[0]) for node in graph.find_nodes(op="call_function", target=recurrent))
    return tuple(leaf for leaf in origins if leaf is not None)


def _origin(value: Any) -> int | None:
    while isinstance(value, fx.Node):
        if value.op == "placeholder":
            return leaf_of_placeholder(value)
        keeps = (value.op == "call_function" and value.target in _KEEPS_FIRST_DIM) or (
            value.op == "call_method" and value.target in _METHODS
        )
        if keeps:
            value = value.args[0] if value.args else None
        elif value.target is operator.getitem and value.args[1] == 0 and value.args[0].target is recurrent:  # type: ignore[union-attr]
            value = value.args[0].args[0]  # type: ignore[union-attr]
        elif value.target is torch.cat and _dim(value) not in (0, None):
            value = value.args[0][0]  # type: ignore[index]
        else:
            return None
    return None


def _dim(cat: fx.Node) -> Any:
    return cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)


def refuse_split_time(leaves: Sequence[Leaf], with_time_first: Sequence[int], model_name: str) -> None:
    for index in with_time_first:
        leaf = leaves[index]
        if leaf.split:
            raise problem(
                CaptureError,
                f"MC2502: a recurrent layer of {model_name} takes dim 0 of argument {leaf.path!r} as time",
                "arguments are split along dim 0, where the examples are expected",
                (
                    f"mirrorc.batch_dim({leaf.path}, 1)",
                    "make the layer with batch_first=True, and pass arguments with the examples first",
                    f"pass the examples first, and give the layer {leaf.path}.transpose(0, 1) in forward",
                ),
            )
