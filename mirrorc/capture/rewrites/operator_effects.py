"""Keeps asserts on tensors, and refuses other operators that are called only for their effect."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import fx

from mirrorc.capture.diagnostics.capture_errors import shape_depends_on_values
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import is_operator, schema_of, with_overload, writes_argument

_aten: Any = torch.ops.aten
_ASSERTS = (_aten._assert_async.msg, _aten._functional_assert_async.msg)
_IDLE = ("profiler", "aten::_assert_tensor_metadata", "aten::sym_constrain_range")  # labels; facts proved by tracing


def keep_asserts(graph: fx.Graph, tangent: fx.Node | None, model_name: str) -> None:
    """Turns each assert on a tensor into a `mirrorc.ir.ops.check`, which no pass removes."""
    first_backward = min(tangent.users, default=None) if tangent is not None else None
    for node in list(graph.nodes):
        if not is_compute(node) or node.users or not _has_effect(node.target):
            continue
        if node.target not in _ASSERTS:
            _refuse(node.target, node, model_name)
        if first_backward is not None and first_backward < node:
            raise problem(
                CaptureError,
                f"MC2506: {model_name} asserts something in backward",
                "gradients may be on their way already",
                ("assert it in forward", "compare parameters in your loop, between calls"),
                at=source_line(node),
            )
        condition, text = node.args[0], node.args[1]
        with graph.inserting_before(node):
            check = graph.call_function(ops.check, (condition,), {"text": str(text)})
        check.meta.update(node.meta)
        check.meta["val"] = None
        graph.erase_node(node)


def _refuse(target: Any, node: fx.Node, model_name: str) -> NoReturn:
    if target is _aten._assert_scalar.default:
        raise shape_depends_on_values(model_name, source_line(node))
    raise problem(
        CaptureError,
        f"MC2506: {model_name} calls {target}, which returns nothing",
        "a captured graph leaves out calls whose result nothing uses",
        ("call it in your loop, between calls", "let it return a tensor that the loss depends on"),
        at=source_line(node),
    )


def refuse_effects(graph: fx.Graph, model_name: str) -> None:
    """Refuses operators called only for their effect, because torch's joint export drops them silently."""
    for node in graph.nodes:
        target = with_overload(node.target)
        if is_operator(target) and not writes_argument(target) and _has_effect(target):
            _refuse(target, node, model_name)


def _has_effect(target: Any) -> bool:
    schema = schema_of(target)
    return target in _ASSERTS or (not schema.returns and not schema.name.startswith(_IDLE))
