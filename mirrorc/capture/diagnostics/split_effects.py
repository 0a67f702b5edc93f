"""Finds what a split of the batch breaks: operators that return NaN for one example, and recurrent layers with time first.

Deviations and quotients by n - 1 have no value for a single example. A step would split the time in dim 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mirrorc.capture.call.call_arguments import Leaf
from mirrorc.capture.diagnostics.capture_errors import TWO_EXAMPLES, LoneExampleError
from mirrorc.custom_ops.recurrent import recurrent
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import leaf_of_placeholder

_aten = torch.ops.aten
_MOMENTS = (_aten.std.correction, _aten.var.correction, _aten.std_mean.correction, _aten.var_mean.correction)
_QUOTIENTS = (_aten.div.Tensor, _aten.div.Scalar)


def is_undefined(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if operator in _QUOTIENTS:
        return not isinstance(args[1], torch.Tensor) and args[1] == 0
    if operator not in _MOMENTS:
        return False
    sizes = [args[0].shape[dim] for dim in args[1]] if len(args) > 1 and args[1] else args[0].shape
    correction = kwargs.get("correction")
    return all(type(n) is int for n in sizes) and math.prod(sizes) <= (1 if correction is None else correction)


def undefined_in(graph: fx.Graph) -> str:
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        if node.op == "call_function" and is_undefined(node.target, args, kwargs):
            return source_line(node) or str(node.target)
    return ""


def refuse_undefined(at: str, model_name: str) -> None:
    if at:
        raise problem(
            LoneExampleError,
            f"MC2104: {model_name} divides by the number of a shard's examples less one, and this shard has a single one",
            "the result is no number, and neither is the loss",
            TWO_EXAMPLES,
            at=at,
        )


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
