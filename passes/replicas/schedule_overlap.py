"""Overlaps communication with backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import bucket_of, calls_to, is_computed, origin_of, pack_of, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.messages.wording import counted, listed


@dataclass(frozen=True)
class ScheduleOverlap:
    """Moves each collective right after its last argument, and each `wait` right before its first use::

        pack_0; all_reduce_0; wait_0               pack_0; all_reduce_0
        bwd_1                                ->    bwd_1
        pack_1; all_reduce_1; wait_1               pack_1; all_reduce_1
        update_0(wait_0); update_1(wait_1)         wait_0; update_0(wait_0); wait_1; update_1(wait_1)

    Guarantees: launches are in the order in which buckets become ready; waits are in the order of their uses.
    """

    name: str = field(default="schedule-overlap", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    establishes: ClassVar = (Property.ORDERED,)
    precedes: ClassVar = Property.ORDERED.and_later

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        before = _regions_before(graph)
        for node in list(calls_to(graph, *ops.COLLECTIVES)):
            max(node.all_input_nodes).append(node)  # nodes compare by their places in the graph
        for node in reversed(list(graph.nodes)):
            is_late = node.target is ops.unpack or origin_of(node).target is ops.wait
            if is_computed(node) and is_late and node.users:
                min(node.users).prepend(node)  # as late as the wait for what it takes
        for node in list(calls_to(graph, *ops.COLLECTIVES)):
            _move_waits(node)
        scheduled = program.evolve(stage=Stage.SCHEDULED, graph=graph)
        return scheduled.with_remarks(_moved(before, graph), is_kept=False).with_remarks(*_remarks(graph))


def _move_waits(collective: fx.Node) -> None:
    waits = [user for user in collective.users if user.target is ops.wait]
    used = [node for node in waits if node.users]
    for node in used:
        min(node.users).prepend(node)
    for node in waits:
        if used and not node.users:
            used[-1].append(node)


def _regions_before(graph: fx.Graph) -> dict[str, int]:
    counts, num_regions = {}, 0
    for node in graph.nodes:
        num_regions += node.target is ops.call_region
        if node.target is ops.wait or node.target in ops.COLLECTIVES:
            counts[node.name] = num_regions
    return counts


def _moved(before: Mapping[str, int], graph: fx.Graph) -> str:
    if not before:
        several = "nothing is reduced" if len({replica_of(node) for node in graph.nodes} - {None}) > 1 else ""
        return f"nothing to move: {several or 'one device communicates with nobody'}"
    after = _regions_before(graph)
    launches = {node.name for node in calls_to(graph, *ops.COLLECTIVES)}
    earlier = sum(after[name] < before[name] for name in launches)
    later = sum(after[name] > before[name] for name in after.keys() - launches)
    return (
        f"{earlier} of {counted(len(launches), 'launch', 'launches')} moved before regions, {later} of "
        f"{counted(len(after) - len(launches), 'wait')} behind regions"
    )


def _remarks(graph: fx.Graph) -> list[str]:
    regions = [node for node in calls_to(graph, ops.call_region) if replica_of(node) == 0]
    in_flight, exposed = [], []
    for node in calls_to(graph, ops.all_reduce, ops.all_gather):
        later = [region for region in regions if region > node]
        first_wait = min((user for user in node.users if user.target is ops.wait), default=None)
        beside = [region for region in later if first_wait is None or region < first_wait]
        sum_name = f"pack {pack_of(node)}" if node.kwargs.get("pack") is not None else f"bucket {bucket_of(node)}"
        if beside:
            in_flight.append(f"{len(beside)} for {sum_name}")
        elif later:
            exposed.append(f"the reduction of {sum_name} stays exposed: its sum is used before the next region")
        else:
            exposed.append(f"the reduction of {sum_name} stays exposed: backward ends where it begins")
    kind = "pack" if any(node.kwargs.get("pack") is not None for node in calls_to(graph, ops.all_reduce)) else "bucket"
    overlaps = f"regions that each device runs between the launch of a {kind} and its wait: {listed(in_flight)}"
    return [*([overlaps] if in_flight else []), *exposed]
