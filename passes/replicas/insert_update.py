"""Inserts the optimizer's updates."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.graph_edits import call, copy_into
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.messages.wording import listed, numbered


@dataclass(frozen=True)
class InsertUpdate:
    """Inserts commits, updates and buffer writes after forward and backward.

    An element-wise optimizer updates whole buckets on every replica. Any other optimizer steps on replica 0 only,
    because its state cannot be copied safely, and it may draw random numbers::

        output {losses: (l, l_1), reduced: ((wait, wait_1),), writes: {bn.mean: (m, m_1)}}

        commit(replica=0)
        commit(replica=1)
        update(wait, bucket=0, replica=0)                 # or, for an optimizer that is not element-wise:
        update(wait_1, bucket=0, replica=1)               #   new = step_optimizer(wait, buckets=(0,), replica=0)
        write(m, variable=bn.mean, replica=0)             #   broadcast = broadcast(new[0], bucket=0, root=0)
        write(m_1, variable=bn.mean, replica=1)           #   w   = wait(broadcast, bucket=0, replica=0)
        output {losses: (l, l_1)}                         #   w_1 = wait(broadcast, bucket=0, replica=1)
                                                          #   store(w_1, bucket=0, replica=1)

    A program that accumulates gradients::

        output {reduced: ((pack, pack_1),), ...}    ->    accumulate(pack, bucket=0, replica=0)
                                                          accumulate(pack_1, bucket=0, replica=1)

    A program that leaves gradients to the user::

        output {reduced: ((wait, wait_1),), ...}    ->    add_to_grad(wait, bucket=0, replica=0)

    All operations that can fail precede all commits, so that a failure changes no variable.

    Guarantees: each parameter is updated once per replica, after all its reads in the step, and after the commit.
    """

    name: str = field(default="insert-update", init=False)
    input_stage: Stage = field(default=Stage.REDUCED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        graph = fx.Graph()
        output = copy_into(graph, program.mirrored_graph)
        for replica in range(program.num_replicas):
            call(graph, ops.commit, (), {"replica": replica})
        for bucket in program.buckets:
            if program.leaves_gradients:
                gradient = output["reduced"][bucket.index][0]  # the user's parameters are those of replica 0
                call(graph, ops.add_to_grad, (gradient,), {"bucket": bucket.index, "replica": 0})
            elif program.accumulates:
                for replica, packed in enumerate(output["reduced"][bucket.index]):
                    call(graph, ops.accumulate, (packed,), {"bucket": bucket.index, "replica": replica})
            elif bucket.rule.elementwise:
                for replica, gradient in enumerate(output["reduced"][bucket.index]):
                    call(graph, ops.update, (gradient,), {"bucket": bucket.index, "replica": replica})
        others = [bucket for bucket in program.buckets if not bucket.rule.elementwise]
        if others and program.updates:
            _step_and_broadcast(program, graph, others, output["reduced"])
        for node in calls_to(graph, ops.unpack):
            if not node.users:  # the replica updates nothing, so it does not need its packs together
                graph.erase_node(node)
        for variable, replicas in output["writes"].items():
            for replica, value in enumerate(replicas):
                if value is not None:  # a replica without examples keeps its own
                    call(graph, ops.write, (value,), {"variable": variable, "replica": replica})
        graph.output({"losses": output["losses"]})
        return program.evolve(stage=Stage.UPDATED, graph=graph).with_remarks(*_remarks(program), is_kept=False)


def _remarks(program: Program) -> list[str]:
    if program.accumulates:
        return ["nothing is updated: each replica adds its gradients to those of the calls since the last update"]
    if program.leaves_gradients:
        return ["nothing is updated: the gradients are added to those of the user's parameters when the call ends"]
    remarks = []
    for elementwise, takes_rows in ((True, False), (False, False), (False, True)):
        rules = (elementwise, takes_rows)
        buckets = [b for b in program.buckets if (b.rule.elementwise, b.rule.takes_rows) == rules]
        if not buckets:
            continue
        remark = f"{listed(dict.fromkeys(b.rule.label for b in buckets))}, {numbered('bucket', [b.index for b in buckets])}: "
        if elementwise:
            remark += "works element by element, so every replica updates whole buckets"
        else:
            why = "takes rows of a table" if takes_rows else "does not work element by element"
            remark += f"{why}, so it runs once, on replica 0"
            remark += ", and the new parameters are broadcast" if program.num_replicas > 1 else ""
        remarks.append(remark)
    return remarks


def _step_and_broadcast(program: Program, graph: fx.Graph, buckets: list[Bucket], reduced: Any) -> None:
    gradients = tuple(reduced[bucket.index][0] for bucket in buckets)
    indices = tuple(bucket.index for bucket in buckets)
    updated = call(graph, ops.step_optimizer, gradients, {"buckets": indices, "replica": 0})
    set_type(program, updated)
    if program.num_replicas == 1:
        return
    for place, bucket in enumerate(buckets):
        parameters = call(graph, operator.getitem, (updated, place))
        parameters.meta["val"] = updated.meta["val"][place]
        pending = call(graph, ops.broadcast, (parameters,), {"bucket": bucket.index, "root": 0})
        pending.meta["val"] = ops.Pending(parameters.meta["val"])
        for replica in range(program.num_replicas):
            value = call(graph, ops.wait, (pending,), {"bucket": bucket.index, "replica": replica})
            value.meta["val"] = pending.meta["val"].value
            if replica != 0:
                call(graph, ops.store, (value,), {"bucket": bucket.index, "replica": replica})
