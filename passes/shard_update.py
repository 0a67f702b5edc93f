"""Shares the optimizer's work out: each device updates its share of a bucket, and fetches the others' shares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mirrorc import ops
from mirrorc.program import Bucket, Program, Stage


@dataclass(frozen=True)
class ShardUpdate:
    """Turns an all_reduce and N equal updates of a bucket into a reduce_scatter, N updates of a share, and an all_gather::

        ar = all_reduce(pack, pack_1, bucket=0, ...)          rs = reduce_scatter(pack, pack_1, bucket=0, ...)
        wait   = wait(ar, bucket=0, replica=0)                wait   = wait(rs, bucket=0, replica=0)       # a share
        wait_1 = wait(ar, bucket=0, replica=1)          ->    wait_1 = wait(rs, bucket=0, replica=1)
        update(wait, bucket=0, replica=0)                     u   = update(wait, bucket=0, replica=0)
        update(wait_1, bucket=0, replica=1)                   u_1 = update(wait_1, bucket=0, replica=1)
                                                              ag  = all_gather(u, u_1, bucket=0)
                                                              wait(ag, bucket=0, replica=0)                # at the end
                                                              wait(ag, bucket=0, replica=1)

    Without it every replica runs the whole optimizer. With it the optimizer's work and state exist once. The sums and the
    updates are the same element by element, and so are their bits.

    Needs: element-wise updates, and devices that share one memory.
    Guarantees: every share is updated by one device and reaches all; parameters are fetched after every read in the step.
    Source: Rajbhandari et al., ZeRO, 2020, stage 1.
    """

    name: str = field(default="shard-update", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def run(self, program: Program) -> Program:
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(program.mirrored_graph, values)
        graph.output(fx.node.map_arg(program.mirrored_graph.output_node().args[0], values.__getitem__))
        reductions = {node.kwargs["bucket"]: node for node in ops.calls(graph, ops.all_reduce)}
        buckets, remarks = list(program.buckets), []
        for i, bucket in enumerate(program.buckets):
            if i not in reductions or not bucket.rule.elementwise:
                continue
            reason = _why_not(program, bucket)
            if reason:
                remarks.append(f"bucket {i} is updated whole by every device: {reason}")
            else:
                buckets[i] = replace(bucket, num_shares=program.num_replicas)
                _shard(graph, buckets[i], reductions[i])
        return program.evolve(
            stage=Stage.SCHEDULED, graph=graph, buckets=tuple(buckets), remarks=(*program.remarks, *remarks)
        )


def _why_not(program: Program, bucket: Bucket) -> str:
    if any(device.torch_device.type != "cpu" for device in program.devices):
        return "the devices share no memory"
    if not replace(bucket, num_shares=program.num_replicas).has_a_share_for_all():
        return "it is too small to be shared out"
    return ""


def _shard(graph: fx.Graph, bucket: Bucket, all_reduce: fx.Node) -> None:
    packs = all_reduce.all_input_nodes
    with graph.inserting_before(all_reduce):
        scatter = graph.call_function(ops.reduce_scatter, tuple(packs), {"bucket": bucket.index, "op": "sum"})
    scatter.meta["val"] = ops.Pending(all_reduce.meta["val"].value)
    updates: list[Any] = [None] * len(packs)
    for wait in list(all_reduce.users):
        replica = ops.replica_of(wait)
        assert replica is not None
        wait.args = (scatter,)
        wait.meta["val"] = _share_value(bucket, replica, packs[replica].meta["val"])
        (updates[replica],) = wait.users
    graph.erase_node(all_reduce)
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_after(max(updates, key=order.__getitem__)):
        gather = graph.call_function(ops.all_gather, tuple(updates), {"bucket": bucket.index})
    gather.meta["val"] = ops.Pending(packs[0].meta["val"])
    with graph.inserting_before(graph.output_node()):
        for replica in range(len(packs)):
            wait = graph.call_function(ops.wait, (gather,), {"bucket": bucket.index, "replica": replica})
            wait.meta["val"] = packs[replica].meta["val"]


def _share_value(bucket: Bucket, replica: int, whole: Any) -> Any:
    start, stop = bucket.share(replica)
    with whole.fake_mode:
        return torch.empty(stop - start, dtype=bucket.dtype, device=whole.device)
