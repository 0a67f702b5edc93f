"""Moves launches early and waits late, so that communication runs while backward goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from mirrorc import ops
from mirrorc.program import Program, Stage


@dataclass(frozen=True)
class ScheduleOverlap:
    """Moves each collective to right after its last argument and each `wait` to right before its first use::

        pack_0; all_reduce_0; wait_0               pack_0; all_reduce_0
        bwd_1                                ->    bwd_1
        pack_1; all_reduce_1; wait_1               pack_1; all_reduce_1
        update_0(wait_0); update_1(wait_1)         wait_0; update_0(wait_0); wait_1; update_1(wait_1)

    Needs: collectives and updates in the graph.
    Guarantees: no node but collectives and waits moves; launches keep the order in which buckets become ready; each
        replica waits in the order of its uses.
    """

    name: str = field(default="schedule-overlap", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def run(self, program: Program) -> Program:
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(program.mirrored_graph, values)
        graph.output(fx.node.map_arg(program.mirrored_graph.output_node().args[0], values.__getitem__))
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(ops.calls(graph, *ops.COLLECTIVES)):
            last = max(node.all_input_nodes, key=order.__getitem__)
            last.append(node)
            order[node] = order[last]
        for node in list(ops.calls(graph, *ops.COLLECTIVES)):
            _move_waits(node, order)
        return program.evolve(stage=Stage.SCHEDULED, graph=graph, remarks=(*program.remarks, *_remarks(graph)))


def _move_waits(collective: fx.Node, order: dict[fx.Node, int]) -> None:
    """A wait that nothing uses (its replica only helps to reduce) goes with those of the other replicas."""
    waits = [user for user in collective.users if user.target is ops.wait]
    used = [node for node in waits if node.users]
    for node in used:
        min(node.users, key=order.__getitem__).prepend(node)
    for node in waits:
        if used and not node.users:
            used[-1].append(node)


def _remarks(graph: fx.Graph) -> list[str]:
    """Names the all-reduces that no region can hide."""
    remarks, regions_after = [], 0
    for node in reversed(list(graph.nodes)):
        if node.target is ops.call_region:
            regions_after += 1
        elif node.target is ops.all_reduce and not regions_after:
            remarks.append(f"all_reduce of bucket {node.kwargs['bucket']} stays exposed: backward ends where it begins")
    return remarks[::-1]
