"""Captures one shard with a front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.identical_buffers import vectors_of_spectral_norms, written_alike
from mirrorc.capture.dynamo.sync_batch_norm import buffers_of_synchronized_norms
from mirrorc.capture.front_ends.front_end import FrontEnd, tracing
from mirrorc.capture.model.external_variables import OutsideNames, check_outside_writes
from mirrorc.capture.program.captured_graph import CapturedGraph, restructure
from mirrorc.capture.rewrites.value_names import with_stable_names
from mirrorc.torch_internals import JointGraph


def capture(
    front_end: FrontEnd,
    call: TrainingCall,
    leaves: Sequence[torch.Tensor],
    leaf_names: Sequence[str],
    variable_names: Mapping[str, str],
    trained: Set[str],
    decompositions: Mapping[Any, Callable[..., Any]],
    outside: OutsideNames,
) -> CapturedGraph:
    """``variable_names`` has the variable for each name of a parameter or buffer; tied weights have several names."""
    with tracing(call) as stack:
        traced = front_end.trace(stack, call, leaves, decompositions)
    model_name, names = type(call.model).__name__, outside.names_of(traced.joint.outside, {*variable_names.values()})
    check_outside_writes(traced.joint, names, model_name)
    names = {**variable_names, **names}
    captured = restructure(traced, leaf_names, names, trained, model_name)
    graph = with_stable_names(captured.graph, captured.arguments)
    graph.lint()
    alike = {**_written_alike(graph, call, traced.joint, names), **{names[path]: 0 for path in traced.alike}}
    return replace(captured, graph=graph, alike=alike)


def _written_alike(graph: fx.Graph, call: TrainingCall, joint: JointGraph, names: Mapping[str, str]) -> dict[str, int]:
    roots = [call, *(variable.root for variable in joint.outside.values() if variable.root is not None)]
    of_norms = (vectors_of_spectral_norms, buffers_of_synchronized_norms)
    ids = {tensor_id for ids_in in of_norms for tensor_id in ids_in(roots)} if joint.buffer_writes else set()
    if not ids:
        return {}
    outside = {path: variable.tensor for path, variable in joint.outside.items()}
    tensors = {**dict(call.named_buffers(remove_duplicate=False)), **outside}
    vectors = [names[path] for path in joint.buffer_writes if id(tensors.get(path)) in ids]
    output: Any = graph.output_node().args[0]
    return written_alike(graph, output["writes"], vectors)


def outputs_for(front_end: FrontEnd, call: TrainingCall, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
    with tracing(call):
        return front_end.trace_outputs(call, leaves)
