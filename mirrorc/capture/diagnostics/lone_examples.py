"""Finds operators that return NaN for a shard of one example: deviations, and quotients by n - 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.capture.diagnostics.capture_errors import TWO_EXAMPLES, LoneExampleError
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import source_line

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
