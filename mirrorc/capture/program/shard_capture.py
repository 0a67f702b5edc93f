"""Captures one shard with a front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.identical_buffers import Computation, vectors_of_spectral_norms, written_alike
from mirrorc.capture.dynamo.sync_batch_norm import buffers_of_synchronized_norms
from mirrorc.capture.front_ends.front_end import FrontEnd, tracing
from mirrorc.capture.model.external_variables import OutsideNames, check_outside_writes
from mirrorc.capture.program.captured_graph import CapturedGraph, restructure
from mirrorc.capture.rewrites.value_names import with_stable_names
from mirrorc.ir.program import ArgumentKind
from mirrorc.torch_internals import JointGraph

_SAME_FOR_ALL = (ArgumentKind.NUMBER, ArgumentKind.NUM_REPLICAS)


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
    """``variable_names`` maps names of parameters and buffers to variables; tied weights have several names."""
    with tracing(call) as stack:
        traced = front_end.trace(stack, call, leaves, decompositions)
    model_name, names = type(call.model).__name__, outside.names_of(traced.joint.outside, {*variable_names.values()})
    check_outside_writes(traced.joint, names, model_name)
    names = {**variable_names, **names}
    captured = restructure(traced, leaf_names, names, trained, model_name)
    graph = with_stable_names(captured.graph, captured.arguments)
    graph.lint()
    arguments = zip(graph.find_nodes(op="placeholder"), captured.arguments, strict=True)
    same = {node.target for node, argument in arguments if argument.kind in _SAME_FOR_ALL}
    alike = _written_alike(graph, call, traced.joint, names, same)
    alike |= {names[path]: Computation(0) for path in traced.alike}
    return replace(captured, graph=graph, alike=alike)


def _written_alike(
    graph: fx.Graph, call: TrainingCall, joint: JointGraph, names: Mapping[str, str], arguments: Set[Any]
) -> dict[str, Computation]:
    if not joint.buffer_writes:
        return {}
    roots = [call, *(variable.root for variable in joint.outside.values() if variable.root is not None)]
    of_spectral_norms, of_synchronized_norms = vectors_of_spectral_norms(roots), buffers_of_synchronized_norms(roots)
    outside = {path: variable.tensor for path, variable in joint.outside.items()}
    tensors = {**dict(call.named_buffers(remove_duplicate=False)), **outside}
    ids = {names[path]: id(tensors.get(path)) for path in joint.buffer_writes}
    vectors = {name for name, tensor_id in ids.items() if tensor_id in of_spectral_norms}
    statistics = {name for name, tensor_id in ids.items() if tensor_id in of_synchronized_norms}
    output: Any = graph.output_node().args[0]
    counters = {names[path] for path in joint.buffer_writes if path.endswith("num_batches_tracked")} - statistics
    return written_alike(graph, output["writes"], vectors, statistics, counters, arguments)


def outputs_for(front_end: FrontEnd, call: TrainingCall, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
    with tracing(call):
        return front_end.trace_outputs(call, leaves)
