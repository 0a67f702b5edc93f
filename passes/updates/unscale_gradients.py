"""Divides reduced gradients by the scale of the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import before_rescaling, gradient_takers, rescalings_of, taken_by
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Property, Stage

aten = torch.ops.aten


@dataclass(frozen=True)
class UnscaleGradients:
    """Undoes loss scaling, which keeps small 16-bit gradients from being rounded to zero::

        n = norm(met, norm_type=2.0, replica=0)        n = norm(met, norm_type=2.0, replica=0)
        tell(n, what=grad_norm, replica=0)             m = div(n, loss_scale(replica=0))
        f = clip_factor(n, max_norm=1.0, replica=0)    tell(m, what=grad_norm, replica=0)
        g = scale(wait_0, f, replica=0)           ->   f = clip_factor(m, max_norm=1.0, replica=0)
        update(g, bucket=0, replica=0)                 e = div(f, loss_scale(replica=0))
        update(wait_1, bucket=1, replica=0)            g = scale(wait_0, e, replica=0)
                                                       update(g, bucket=0, replica=0)
                                                       r = reciprocal(loss_scale(replica=0))
                                                       h = scale(wait_1, r, replica=0)
                                                       update(h, bucket=1, replica=0)

    The runtime multiplies the gradient of the loss by the scale; check-finite skips steps that overflow.

    Needs: to run after clip-gradients, if both run.
    Guarantees: updates, norms and bounds see unscaled gradients; each gradient is scaled once.
    Source: `torch.amp.GradScaler` (Micikevicius et al., 2018).
    """

    name: str = field(default="unscale-gradients", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    establishes: ClassVar = (Property.UNSCALED,)
    precedes: ClassVar = Property.UNSCALED.and_later

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        properties = (*program.properties, Property.UNSCALED)
        program = program.evolve(stage=Stage.SCHEDULED, graph=graph, properties=properties)
        norms = dict.fromkeys(node.all_input_nodes[0] for node in calls_to(graph, ops.tell, ops.clip_factor))
        for norm in norms:
            users = [user for user in norm.users if user.target in (ops.tell, ops.clip_factor)]
            unscaled = insert(program, min(users), aten.div.Tensor, (norm, _scale(program, min(users))))
            for user in users:
                user.replace_input_with(norm, unscaled)
        divided: dict[fx.Node, fx.Node] = {}
        for taker in list(gradient_takers(graph)):
            for _, value in taken_by(taker):
                _divide(program, taker, value, divided)
        return program.with_remarks(
            "the loss is multiplied by a scale before backward, and gradients are divided by it before updates take them"
        )


def _scale(program: Program, before: fx.Node) -> fx.Node:
    return insert(program, before, ops.loss_scale, (), {"replica": replica_of(before)})


def _divide(program: Program, taker: fx.Node, value: fx.Node, divided: dict[fx.Node, fx.Node]) -> None:
    rescalings = rescalings_of(value)
    scaling = next((node for node in rescalings if node.target is ops.scale), None)
    if scaling is not None:
        factor: Any = scaling.args[1]
        if factor not in divided:
            after = factor.next
            divided[factor] = insert(program, after, aten.div.Tensor, (factor, _scale(program, after)))
        scaling.replace_input_with(factor, divided[factor])
        return
    first = rescalings[0] if rescalings else taker
    gradient, replica = before_rescaling(value), replica_of(taker)
    factor = insert(program, first, aten.reciprocal.default, (_scale(program, first),))
    first.replace_input_with(gradient, insert(program, first, ops.scale, (gradient, factor), {"replica": replica}))
