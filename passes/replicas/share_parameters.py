"""Stores parameters once for devices of one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.graph_edits import call, copied, insert
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.ir.nodes import calls_to, pack_of, replica_of, users_of_sum
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.ir.variables import Placement
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import numbered


@dataclass(frozen=True)
class ShareParameters:
    """Turns the updates of N copies of a bucket's parameters into updates of N shares of one copy::

        ar_0   = all_reduce(p_0, q_0, bucket=0, ...)          rs_0   = reduce_scatter(p_0, q_0, bucket=0, ...)
        bwd_1 ...                                             bwd_1 ...
        ar_1   = all_reduce(p_1, q_1, bucket=1, ...)    ->    rs_1   = reduce_scatter(p_1, q_1, bucket=1, ...)
        wait_0 = wait(ar_0, bucket=0, replica=0)              wait_1 = wait(rs_1, bucket=1, replica=0)   # a share of the sum
        update(wait_0, bucket=0, replica=0)                   update(wait_1, bucket=1, replica=0)
        wait_1 = wait(ar_1, bucket=1, replica=0)              wait_0 = wait(rs_0, bucket=0, replica=0)
        update(wait_1, bucket=1, replica=0)                   update(wait_0, bucket=0, replica=0)
        (the same on replica 1)                               (the same on replica 1: the other shares)

    Waits and updates follow the commit, because no device reads parameters after it. An optimizer that is not
    element-wise steps once, after all waits.

    Packs of a cut bucket are still reduced whole, because shares of packs are not shares of the bucket::

        unpack = unpack(wait_0, wait_1, bucket=0, replica=0)  ->  unpack = unpack(wait_0, wait_1, bucket=0, replica=0)
        update(unpack, bucket=0, replica=0)                       share  = aten.slice(unpack, 0, 0, 64)
                                                                  update(share, bucket=0, replica=0)

    Guarantees: every share has one writer; the bits are those of mirrored parameters.
    Source: stage 1 of ZeRO (Rajbhandari et al., 2020), without the all-gather.
    """

    name: str = field(default="share-parameters", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    establishes: ClassVar = (Property.PLACED,)
    precedes: ClassVar = Property.EXCHANGED.and_later

    def run(self, program: Program) -> Program:
        if any(bucket.placement is Placement.SHARED for bucket in program.buckets):
            raise PassError(
                "MC4003: pass 'share-parameters' was given parameters that are shared already: leave one of them out"
            )
        if program.num_replicas == 1:
            alone = program.evolve(stage=Stage.SCHEDULED)
            return alone.with_remarks("nothing to share: there is one device", is_kept=False)
        if why_not := why_memory_is_not_shared(program.devices):
            remark = f"parameters are mirrored, each device has a copy: {why_not}"
            return program.evolve(stage=Stage.SCHEDULED).with_remarks(remark)
        graph = copied(program.mirrored_graph)
        buckets = tuple(replace(bucket, placement=Placement.SHARED) for bucket in program.buckets)
        reductions = {pack_of(node): node for node in calls_to(graph, ops.all_reduce)}
        shared = program.evolve(graph=graph, buckets=buckets)
        for bucket in reversed(buckets):
            if not bucket.rule.elementwise or program.accumulates:
                continue
            if bucket.is_gathered:
                raise problem(
                    PassError,
                    f"MC4003: bucket {bucket.index} cannot be updated in shares: workers send its gradients as factors",
                    "each device gathers all factors, and so makes the whole bucket",
                    "communication=mirrorc.Communication(exchange='dense')",
                )
            (first, *others) = (reductions[pack.number] for pack in bucket.launch_units)
            if others:
                _take_shares(shared, bucket, [first, *others])
            else:
                _scatter(shared, bucket, first)
        for node in list(calls_to(graph, ops.broadcast)):
            (parameters,) = node.all_input_nodes
            _erase(node)
            if not parameters.users:
                graph.erase_node(parameters)
        # it writes, too, and has waited for its own buckets alone
        for node in list(calls_to(graph, ops.step_optimizer)):
            graph.output_node().prepend(node)
        for node in list(calls_to(graph, ops.write)):  # when every device is done, so that a failure leaves them alone
            graph.output_node().prepend(node)
        return shared.evolve(stage=Stage.SCHEDULED).with_remarks(*_remarks(shared))


def _remarks(program: Program) -> list[str]:
    shared = [bucket.index for bucket in program.buckets if bucket.rule.elementwise]
    cut = [bucket.index for bucket in program.buckets if bucket.rule.elementwise and bucket.is_cut]
    whole = [bucket for bucket in program.buckets if not bucket.rule.elementwise]
    storage = f"parameters and optimizer state are kept once for {program.num_replicas} devices, which share one memory"
    if not program.updates:
        return [f"{storage}; nothing is updated here"]
    remarks = [storage + (": each device reduces and updates its share of each bucket" if shared else "")]
    if shared:
        writing = "parameters are written after the commit, when no device reads them any more"
        is_last = len(shared) > 1 and shared[-1] == program.buckets[-1].index and not program.workers.are_several
        order = (
            f"; bucket {shared[-1]}, launched last, is waited for first, though any order would do" if is_last else ""
        )
        remarks.append(writing + order)
    if cut:
        remarks.append(
            f"{numbered('bucket', cut)}: reduced whole, pack by pack; each device takes its share of them all"
        )
    if whole:
        names = numbered("bucket", [bucket.index for bucket in whole])
        kinds = " and ".join(sorted({bucket.rule.label for bucket in whole}))
        remarks.append(f"{names}: reduced whole, not by shares: {kinds} does not work on shares of them and steps once")
    return remarks


def _scatter(program: Program, bucket: Bucket, all_reduce: fx.Node) -> None:
    graph = program.mirrored_graph
    with graph.inserting_before(all_reduce):
        words = {key: value for key, value in all_reduce.kwargs.items() if key != "link"}
        scatter = call(graph, ops.reduce_scatter, all_reduce.args, words)
    scatter.meta["val"] = ops.Pending(all_reduce.meta["val"].value)
    end = graph.output_node()
    for wait in list(all_reduce.users):
        replica: Any = replica_of(wait)
        start, stop = bucket.share(replica, program.num_replicas)
        wait.args = (scatter,)
        set_type(program, wait)
        end.prepend(wait)
        used_by = users_of_sum(wait)
        for node in used_by if start < stop else ():
            end.prepend(node)
            set_type(program, node)
        for node in reversed(used_by) if start == stop else ():
            graph.erase_node(node)  # in a small bucket, the shares of some replicas are empty
    graph.erase_node(all_reduce)


def _take_shares(program: Program, bucket: Bucket, all_reduces: Sequence[fx.Node]) -> None:
    graph = program.mirrored_graph
    end = graph.output_node()
    for all_reduce in sorted(all_reduces):
        for wait in sorted(all_reduce.users):
            end.prepend(wait)
    for replica in range(program.num_replicas):
        start, stop = bucket.share(replica, program.num_replicas)
        waits = [wait for all_reduce in all_reduces for wait in all_reduce.users if replica_of(wait) == replica]
        used_by = sorted({node for wait in waits for node in users_of_sum(wait)})
        for node in used_by:
            end.prepend(node)
        for update in [node for node in used_by if node.target is ops.update]:
            if start == stop:
                _erase(next(node for node in used_by if node.target is ops.unpack))
                break
            (whole,) = update.args[:1]
            share = insert(program, update, torch.ops.aten.slice.Tensor, (whole, 0, start, stop))
            update.replace_input_with(whole, share)  # type: ignore[arg-type]


def _erase(node: fx.Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
