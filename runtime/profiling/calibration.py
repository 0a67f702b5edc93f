"""Measured costs of a step's calls."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from mirrorc.analysis.cost.line import Line
from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.analysis.cost.step_costs import (
    Pace,
    StepCosts,
    calls_by_phase,
    kind_of_call,
    num_bytes_of_call,
    works_of_regions,
)
from mirrorc.analysis.cost.work import Machine
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_region_call, region_of
from mirrorc.ir.program import Program
from mirrorc.runtime.profiling.accounting import typical
from mirrorc.runtime.profiling.collectives import collectives_of, skew_ns
from mirrorc.runtime.profiling.recorder import RecordedStep


def costs_of_steps(program: Program, steps: Sequence[RecordedStep], machine: Machine, link: LinkSpeed) -> StepCosts:
    """Costs of a lowered program's calls, as means over typical steps, without waits between workers.

    A commit costs as much as on the device that arrives last.
    """
    steps = typical([step for step in steps if not step.warms_up] or steps)
    replicas = range(program.num_replicas)
    works = works_of_regions(program, machine)
    graphs = [module.graph for module in program.device_graphs.values()]
    seconds = [_seconds_of_calls(steps, replica) for replica in replicas]
    paces: list[Mapping[str, Pace]] = [
        {
            phase: Pace.of([works[region_of(node)] for node in nodes], [seconds[replica][node] for node in nodes])
            for phase, nodes in calls_by_phase(program, graph).items()
        }
        for replica, graph in enumerate(graphs)
    ]
    begins = [
        statistics.fmean((step.started_ns[replica] - step.begun_ns) / 1e9 for step in steps) for replica in replicas
    ]
    return StepCosts(tuple(begins), tuple(paces), _lines(program, seconds), machine, link)


def _seconds_of_calls(steps: Sequence[RecordedStep], replica: int) -> dict[fx.Node, float]:
    """Without waits for other devices."""
    seconds: defaultdict[fx.Node, list[float]] = defaultdict(list)
    for step in steps:
        skews = {
            launch.wait: skew_ns(step, launch)
            for collective in collectives_of(step)
            for launch in collective.launches
            if launch.wait is not None and launch.replica == replica
        }
        last_ns = max(
            (call.start_ns for device_calls in step.calls for call in device_calls if call.node.target is ops.commit),
            default=0,
        )
        for call in step.calls[replica]:
            waited = skews.get(call.node, 0)
            if call.node.target is ops.commit:
                waited = max(0, last_ns - call.start_ns)
            seconds[call.node].append(max(0, call.duration_ns - waited) / 1e9)
    return {node: statistics.fmean(durations) for node, durations in seconds.items()}


def _lines(program: Program, seconds: Sequence[Mapping[fx.Node, float]]) -> dict[str, Line]:
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for replica, device_seconds in enumerate(seconds):
        for node, took in device_seconds.items():
            if is_region_call(node) or _is_wait_between_workers(node):
                continue
            points[kind_of_call(program, node)].append((num_bytes_of_call(program, replica, node), took))
    return {kind: Line.through(kind_points) for kind, kind_points in points.items()}


def _is_wait_between_workers(node: fx.Node) -> bool:
    return node.target is ops.wait and node.all_input_nodes[0].target in ops.BETWEEN_WORKERS
