"""Runs Dynamo and the joint export, and gives one graph of forward, loss and backward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mirrorc.capture.captured_graph import CapturedGraph, _restructure
from mirrorc.capture.errors import check_loss, check_writes, explain
from mirrorc.capture.training_call import TrainingCall
from mirrorc.capture.value_names import with_stable_names
from mirrorc.torch_internals import export_joint_graph, trace_full_graph


def capture(
    call: TrainingCall,
    leaves: Sequence[torch.Tensor],
    leaf_names: Sequence[str],
    variable_names: Mapping[str, str],
    trained: Set[str],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> CapturedGraph:
    """Captures one step on one shard.

    Args:
        call: model and loss.
        leaves: example tensors; their shapes, strides and dtypes are fixed in the graph.
        leaf_names: identifiers for them.
        variable_names: from the names that parameters and buffers have in ``call`` to the names of variables (tied
            weights have several names and are one variable).
        trained: the variables that the optimizer updates.
        decompositions: of ATen operators, as the backend likes them.

    Raises:
        CaptureError: with the user's file and line, the reason and a remedy.
    """
    what = type(call.model).__name__
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        traced = _trace(call, leaves, what)
        check_writes(traced, what)
        check_loss(traced, what)
        try:
            joint = export_joint_graph(stack, traced, leaves, decompositions)
        except Exception as error:
            raise explain(error, what) from error
    captured = _restructure(joint, leaf_names, variable_names, trained, what)
    graph = with_stable_names(captured.graph)
    graph.lint()
    return replace(captured, graph=graph)


def _trace(call: TrainingCall, leaves: Sequence[torch.Tensor], what: str) -> fx.GraphModule:
    try:
        return trace_full_graph(call, leaves)
    except Exception as error:
        raise explain(error, what) from error
