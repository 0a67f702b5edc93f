"""Adds a loss to a traced forward, to begin backward if the caller computes the real loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import fx

from mirrorc.capture.diagnostics.capture_errors import NoGradientError, refuse_complex
from mirrorc.custom_ops.output_tangents import output_tangent
from mirrorc.torch_internals import give_values


def weight_outputs(traced: fx.GraphModule, names: Sequence[str], model_name: str) -> None:
    """The graph then returns a loss, the sum of its outputs times their tangents, and the outputs.

    Raises:
        NoGradientError: no output needs a gradient.
        CaptureError: an output that needs a gradient is complex.
    """
    graph = traced.graph
    values = graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    detached = [value for value in values[len(values) - len(names) :] if isinstance(value, fx.Node)]
    with graph.inserting_before(graph.output_node()):
        products = [
            _product(graph, source, name, model_name)
            for name, value in zip(names, detached, strict=True)
            if (source := _attached(value)).meta["example_value"].requires_grad
        ]
        if not products:
            raise NoGradientError(f"no output of {model_name} needs a gradient")
        dtype = functools.reduce(torch.promote_types, (value.meta["example_value"].dtype for value in products))
        alike = [_added(graph, torch.Tensor.to, value, dtype) for value in products]
        loss = functools.reduce(functools.partial(_added, graph, torch.add), alike)
    give_values(traced, [loss, *detached])


def _attached(detached: fx.Node) -> fx.Node:
    copied = detached.args[0] if detached.target is torch.clone else detached
    assert isinstance(copied, fx.Node) and isinstance(copied.args[0], fx.Node)
    return copied.args[0]


def _product(graph: fx.Graph, output: fx.Node, name: str, model_name: str) -> fx.Node:
    refuse_complex({name: output.meta["example_value"]}, model_name)
    own = _added(graph, torch.Tensor.detach, output)
    tangent = _added(graph, output_tangent, own, name)
    return _added(graph, torch.sum, _added(graph, torch.mul, output, tangent))


def _added(graph: fx.Graph, function: object, *operands: object) -> fx.Node:
    node = graph.call_function(function, operands)  # type: ignore[arg-type]
    values = [operand.meta["example_value"] if isinstance(operand, fx.Node) else operand for operand in operands]
    node.meta["example_value"] = function(*values)  # type: ignore[operator]
    return node
