"""Replaces calls of `mirrorc.all_reduce` and the like by operations of the IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.gradients.eager_gradients import plain_exchange
from mirrorc.capture.diagnostics.capture_errors import EVEN_BATCHES
from mirrorc.custom_ops import replica_collectives
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Argument, ArgumentKind, Program
from mirrorc.ir.value_types import say_type, value_type
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import module_of, source_line

_ARGUMENTS = {
    replica_collectives.replica_number: ArgumentKind.REPLICA,
    replica_collectives.replica_count: ArgumentKind.NUM_REPLICAS,
}
_MEETINGS = {
    replica_collectives.all_reduce_value: ops.sum_over_replicas,
    replica_collectives.all_gather_value: ops.rows_of_replicas,
    replica_collectives.own_rows_of_sum: ops.own_rows_of_sum,
}
_ASKED_BY: dict[Any, str] = {
    ops.sum_over_replicas: "mirrorc.all_reduce",
    ops.rows_of_replicas: "mirrorc.all_gather",
    ops.own_rows_of_sum: "backward of mirrorc.all_gather",
}


def keep_replica_values(graph: fx.Graph) -> list[Argument]:
    """Replaces exchanges between replicas by numbered operations of the IR, and replica numbers by arguments.

    Returns:
        The added arguments, in the order of their placeholders, which come last.
    """
    arguments = [argument for target, kind in _ARGUMENTS.items() for argument in _number(graph, target, kind)]
    for number, node in enumerate(list(calls_to(graph, *_MEETINGS))):
        details: dict[str, Any] = {"number": number}
        if node.target is not replica_collectives.all_reduce_value:
            details["rows"] = len(node.meta["val"])
        node.target, node.args, node.kwargs = _MEETINGS[node.target], node.args[:1], details
        results = [user for user in node.users if user.op == "output" or user.target in ops.OF_FORWARD]
        if results:
            with graph.inserting_after(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            for user in results:
                user.replace_input_with(node, copy)
    return arguments


def _number(graph: fx.Graph, target: Any, kind: ArgumentKind) -> list[Argument]:
    asked = [node for node in graph.find_nodes(op="call_function", target=target) if node.users]
    if not asked:
        return []
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        argument = graph.placeholder(kind.value)
    argument.meta["val"] = asked[0].meta["val"]
    for node in asked:
        (like,) = node.all_input_nodes
        node.replace_all_uses_with(argument)
        graph.erase_node(node)
        if not like.users and like.op == "call_function":
            graph.erase_node(like)
    return [Argument(kind.value, kind)]


def refuse_replica_values(
    graphs: Sequence[fx.Graph],
    runs: Sequence[Sequence[int]],
    devices: Sequence[Device],
    *,
    in_parts: bool,
    model_name: str,
) -> None:
    met = [list(calls_to(graph, *ops.MEETINGS)) for graph in graphs]
    first = next(filter(None, [*(node for items in met for node in items), *map(plain_exchange, graphs)]), None)
    if first is None:
        return
    call = f"{model_name} calls {_say(first)}"
    if in_parts:
        raise problem(
            CaptureError,
            f"MC2503: {call}, and its shards are run in microbatches",
            "replicas would meet for parts of the batch, and the loss would not be that of the whole batch",
            "leave microbatches= out",
        )
    if len(devices) > 1 and any(device.is_asynchronous for device in devices):
        raise problem(
            CaptureError,
            f"MC2503: {call}, which several GPUs cannot do yet",
            fix=("devices=['cpu:0', 'cpu:1']", "devices=['cuda:0']"),
        )
    if first.target not in ops.MEETINGS:
        return
    run = sorted({shard for items in runs for shard in items})
    for shard in run[1:]:
        _refuse_met_otherwise(met[run[0]], met[shard], model_name)


def refuse_stale_buffers(
    written: Sequence[str], runs: Sequence[Sequence[int]], graph: fx.Graph, model_name: str
) -> None:
    """In plain PyTorch, nothing shows if a buffer's value is the same on all replicas."""
    if written and not all(runs) and plain_exchange(graph) is not None:
        raise problem(
            CaptureError,
            f"MC2503: {model_name} writes the buffer {written[0]!r} for a batch of fewer examples than devices",
            "it calls mirrorc.all_reduce or the like as plain PyTorch, and a replica without examples would not know the value",
            (
                f"give batches of at least {len(runs)} examples, drop_last=True",
                "compiler=mirrorc.Compiler(capture='dynamo')",
            ),
        )


def _refuse_met_otherwise(first: Sequence[fx.Node], other: Sequence[fx.Node], model_name: str) -> None:
    for node, same in zip(first, other, strict=False):
        if (node.target, source_line(node)) != (same.target, source_line(same)):
            raise problem(
                CaptureError,
                f"MC2503: {model_name} calls {_say(node)} for one shard size, and {_say(same)} for another",
                "replicas with different collectives would wait for each other",
                EVEN_BATCHES,
            )
        types = [value_type(meeting.all_input_nodes[0].meta["val"]) for meeting in (node, same)]
        is_of_rows = node.target is ops.rows_of_replicas
        shapes = [kind[1][1:] if is_of_rows else kind[1] for kind in types]
        if shapes[0] != shapes[1] or types[0][3] != types[1][3]:
            remedy = (
                "what is gathered may have other numbers of rows, and must be alike in all else"
                if is_of_rows
                else "reduce it over the examples before, or gather it by mirrorc.all_gather"
            )
            raise problem(
                CaptureError,
                f"MC2503: {_say(same)} in {model_name} is given different types on two replicas",
                f"{say_type(types[0])} and {say_type(types[1])} do not go together: the shape follows the number of examples",
                (remedy, EVEN_BATCHES),
            )
    if len(first) != len(other):
        more = max((first, other), key=len)[min(len(first), len(other))]
        raise problem(
            CaptureError,
            f"MC2503: {model_name} calls {_say(more)} for a shard of one size, and not for another",
            "replicas that call it would wait for those that do not",
            EVEN_BATCHES,
        )


def _say(node: fx.Node) -> str:
    if node.target not in ops.MEETINGS:
        return "mirrorc.all_reduce or the like as plain PyTorch"
    kinds = [kind for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    if kinds and "SyncBatchNorm" in str(kinds[-1]):
        return f"the SyncBatchNorm {module_of(node)!r}"
    line = source_line(node)
    return _ASKED_BY[node.target] + (f" at {line}" if line else "")


def refuse_over_workers(program: Program) -> None:
    if not program.meets_workers:
        return
    if any(map(plain_exchange, program.shard_graphs)):
        raise problem(
            CaptureError,
            "MC2503: the model asks for values of all replicas as plain PyTorch, which several workers cannot do yet",
            "replicas of other workers would not hear of it",
            ("compiler=mirrorc.Compiler(capture='dynamo')", "python train.py, in one process, with devices=2"),
        )
    if not any(device.is_asynchronous for device in program.devices):
        return
    met = next((node for graph in program.shard_graphs for node in calls_to(graph, *ops.MEETINGS)), None)
    if met is not None:
        raise problem(
            CaptureError,
            f"MC2503: the model calls {_say(met)}, which several workers with GPUs cannot do yet",
            fix=("devices=['cpu:0'], on each worker", "python train.py, in one process, with devices=['cuda:0']"),
        )
