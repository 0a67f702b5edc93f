"""Moves launches early and waits late, so that communication runs while backward goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import bucket_of, calls_to, is_computed, origin_of
from mirrorc.ir.program import Program, Stage


@dataclass(frozen=True)
class ScheduleOverlap:
    """Moves each collective to right after its last argument and each `wait` to right before its first use::

        pack_0; all_reduce_0; wait_0               pack_0; all_reduce_0
        bwd_1                                ->    bwd_1
        pack_1; all_reduce_1; wait_1               pack_1; all_reduce_1
        update_0(wait_0); update_1(wait_1)         wait_0; update_0(wait_0); wait_1; update_1(wait_1)

    Needs: collectives and updates in the graph.
    Guarantees: no node but collectives, waits and what operators of torch make of a sum moves; launches keep the order in
        which buckets become ready; each replica waits in the order of its uses.
    """

    name: str = field(default="schedule-overlap", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    latest_input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        for node in list(calls_to(graph, *ops.COLLECTIVES)):
            max(node.all_input_nodes).append(node)  # nodes compare by their places in the graph
        for node in reversed(list(graph.nodes)):
            if is_computed(node) and origin_of(node).target is ops.wait and node.users:
                min(node.users).prepend(node)  # as late as the wait for what it takes
        for node in list(calls_to(graph, *ops.COLLECTIVES)):
            _move_waits(node)
        return program.evolve(stage=Stage.SCHEDULED, graph=graph, remarks=(*program.remarks, *_remarks(graph)))


def _move_waits(collective: fx.Node) -> None:
    """A wait that nothing uses (its replica only helps to reduce) goes with those of the other replicas."""
    waits = [user for user in collective.users if user.target is ops.wait]
    used = [node for node in waits if node.users]
    for node in used:
        min(node.users).prepend(node)
    for node in waits:
        if used and not node.users:
            used[-1].append(node)


def _remarks(graph: fx.Graph) -> list[str]:
    """Names the reductions that no region can hide."""
    remarks, regions_after = [], 0
    for node in reversed(list(graph.nodes)):
        if node.target is ops.call_region:
            regions_after += 1
        elif node.target is ops.all_reduce and not regions_after:
            remarks.append(f"the reduction of bucket {bucket_of(node)} stays exposed: backward ends where it begins")
    return remarks[::-1]
