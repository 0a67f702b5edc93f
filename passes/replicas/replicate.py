"""Repeats the outlined graph for every device."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import call, copy_node
from mirrorc.ir.names import of_replica
from mirrorc.ir.nodes import calls_to, is_compute, name_of
from mirrorc.ir.program import ArgumentKind, Program, Stage
from mirrorc.messages.wording import listed, numbered
from mirrorc.printing.printed_values import type_of


@dataclass(frozen=True)
class Replicate:
    """Interleaves copies of the graph for all devices; the keyword ``replica`` distinguishes their nodes::

        fwd_0 = call_region(x, read, region=fwd_0)        fwd_0   = call_region(x, read, region=fwd_0, replica=0)
        loss  = fwd_0[0]                            ->    loss    = fwd_0[0]
        output {loss: loss}                               fwd_0_1 = call_region(x_1, read_1, region=fwd_0, replica=1)
                                                          loss_1  = fwd_0_1[0]
                                                          output {losses: (loss, loss_1)}

    A replica without examples has no nodes, and None as results. On a worker without examples, replica 0 joins the
    model's collectives (`attend`).

    Guarantees: each replica runs the graph of its shard shape; no edge joins two replicas.
    """

    name: str = field(default="replicate", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.REPLICATED, init=False)

    def run(self, program: Program) -> Program:
        graph = fx.Graph()
        copies: list[dict[fx.Node, fx.Node]] = [{} for _ in program.devices]
        sources = [program.shard_graphs[shard] if shard is not None else None for shard in program.shard_of_replica]
        for step in zip_longest(*(_calls(source) for source in sources), fillvalue=()):
            for replica, nodes in enumerate(step):
                for node in nodes:
                    copies[replica][node] = _copy(graph, node, copies[replica], replica)
        attends = program.meets_workers and not program.present
        for node in calls_to(program.shard_graphs[0], *ops.MEETINGS) if attends else ():
            call(graph, ops.attend, (), _words_of(node)).meta["val"] = None
        outputs: list[Any] = [
            fx.node.map_arg(source.output_node().args[0], copies[replica].__getitem__) if source is not None else None
            for replica, source in enumerate(sources)
        ]
        first: Any = program.shard_graphs[0].output_node().args[0]  # all have the same names

        def of_all(kind: str) -> dict[str, tuple[fx.Node | None, ...]]:
            return {name: tuple(o[kind][name] if o is not None else None for o in outputs) for name in first[kind]}

        losses = tuple(output["loss"] if output is not None else None for output in outputs)
        graph.output({"losses": losses, "gradients": of_all("gradients"), "writes": of_all("writes")})
        replicated = program.evolve(stage=Stage.REPLICATED, graph=graph, shard_graphs=(), shard_of_replica=())
        return replicated.with_remarks(_remark(program), is_kept=False)


def _words_of(meeting: fx.Node) -> dict[str, Any]:
    value = meeting if meeting.target is ops.rows_of_replicas else meeting.all_input_nodes[0]
    example = value.meta["val"]
    words = {"number": meeting.kwargs["number"], "meeting": name_of(meeting)}
    return {**words, "shape": tuple(example.shape), "dtype": example.dtype, "replica": 0}


def _remark(program: Program) -> str:
    shards: dict[int, list[int]] = {}
    for replica, shard in enumerate(program.shard_of_replica):
        if shard is not None:
            shards.setdefault(shard, []).append(replica)
    absent = [replica for replica in range(program.num_replicas) if replica not in program.present]
    batch = [argument.name for argument in program.arguments if argument.kind is ArgumentKind.BATCH]
    types = {
        shard: {
            str(node.target): type_of(node.meta["val"])
            for node in program.shard_graphs[shard].find_nodes(op="placeholder")
        }
        for shard in shards
    }
    differing = [name for name in batch if len({shard_types[name] for shard_types in types.values()}) > 1]
    if not batch and not absent:
        return f"{numbered('replica', program.present)} run the same graph: no argument has examples"
    parts = [
        f"{numbered('replica', replicas)} {'runs' if len(replicas) == 1 else 'run'} the graph for "
        + listed([f"{name}: {types[shard][name]}" for name in differing or batch])
        for shard, replicas in shards.items()
    ]
    if absent:
        has = "has" if len(absent) == 1 else "have"
        parts.append(f"{numbered('replica', absent)} {has} no examples, and no nodes of forward and backward")
    return "; ".join(parts) + ("" if len(shards) > 1 or absent else ": all shards have one shape")


def _calls(source: fx.Graph | None) -> list[list[fx.Node]]:
    calls: list[list[fx.Node]] = []
    for node in source.nodes if source is not None else ():
        if node.target is operator.getitem:
            calls[-1].append(node)
        elif node.op != "output":
            calls.append([node])
    return calls


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], replica: int) -> fx.Node:
    if node.op == "placeholder":
        copy = call(graph, ops.argument, (), {"name": str(node.target), "replica": replica})
        copy.meta.update(node.meta)
        return copy
    more = {} if node.target is operator.getitem or is_compute(node) else {"replica": replica}
    return copy_node(graph, node, copies, name=of_replica(node.name, replica), **more)
