"""Moves the scaling of gradients into updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import has_exclusive_memory
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.messages.wording import counted


@dataclass(frozen=True)
class ScaleInUpdates:
    """Passes updates a gradient and its factor, instead of the scaled gradient::

        g = scale(wait_0, f, replica=0)           ->   update(wait_0, f, bucket=0, replica=0)
        update(g, bucket=0, replica=0)

    torch's fused optimizers can divide gradients by a number: here the inverse of the factor. AdamW then makes seven
    passes over memory, not nine.

    Needs: links (lower-collectives), which decide whether replicas read one sum.
    Guarantees: the same gradients up to rounding. The pass changes only float32 gradients on CPUs that are read by one
        update and not clipped by value.

    Attributes:
        groups: the optimizer's groups that torch's fused kernels update.
    """

    groups: tuple[int, ...] = ()
    name: str = field(default="scale-in-updates", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    changes_bits: str = field(
        default="a gradient is divided by the inverse of its factor, or made times the factor, which rounds otherwise than a "
        "product",
        init=False,
    )
    trains_only: ClassVar = True
    updates_only: ClassVar = True

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        scaling = set()
        for update in calls_to(graph, ops.update):
            scaled: Any = update.args[0]
            if scaled.target is ops.scale and self._can_scale(program, update, scaled):
                update.args = scaled.args
                graph.erase_node(scaled)
                scaling.add(bucket_of(update))
        if not scaling:
            return program.evolve(stage=Stage.SCHEDULED).with_remarks(
                "no gradient is scaled by its update: none is scaled last by a factor of 32 bits, for a group of which torch's "
                "fused kernels are known",
                is_kept=False,
            )
        return program.evolve(stage=Stage.SCHEDULED, graph=graph).with_remarks(
            f"the updates of {counted(len(scaling), 'bucket')} scale their gradients as they read them"
        )

    def _can_scale(self, program: Program, update: fx.Node, scaled: fx.Node) -> bool:
        gradient, factor = scaled.all_input_nodes
        bucket, device = program.buckets[bucket_of(update)], program.devices[0].torch_device
        has_places = program.num_replicas == 1 or Property.LINKED in program.properties
        return (
            bucket.rule.group in self.groups
            and device.type == "cpu"
            and bucket.dtype == factor.meta["val"].dtype == torch.float32
            and list(scaled.users) == [update]
            and has_places
            and has_exclusive_memory(gradient)
        )
