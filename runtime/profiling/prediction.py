"""Predicts the duration of a step, and the wait for each bucket."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.analysis.cost.line import Line
from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.analysis.cost.simulation import Simulation, simulate
from mirrorc.analysis.cost.step_costs import (
    Pace,
    StepCosts,
    UnknownCostError,
    calls_by_phase,
    kind_of_call,
    num_bytes_of_call,
    works_of_regions,
)
from mirrorc.analysis.cost.work import Machine
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_region_call, region_of
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program
from mirrorc.runtime.profiling.accounting import typical
from mirrorc.runtime.profiling.collectives import skews_ns
from mirrorc.runtime.profiling.recorder import Call, RecordedStep, nanoseconds


@dataclass(frozen=True)
class PredictedBucket:
    """The predicted wait for other workers, as a mean over devices; ``kind`` is the launch's operation."""

    index: int
    kind: str
    exposed_ms: float


@dataclass(frozen=True)
class Prediction:
    """A simulated step over several workers. Times are means over devices.

    Attributes:
        step_ms: from the start of the first device to the end of the last.
        compute_ms: in regions.
        update_ms: in the optimizer and in writing variables.
        buckets: in the order of their launches.
        stands_on: the inputs of the simulation, in words.
    """

    step_ms: float
    compute_ms: float
    update_ms: float
    buckets: tuple[PredictedBucket, ...]
    stands_on: str

    @property
    def exposed_ms(self) -> float:
        return sum(bucket.exposed_ms for bucket in self.buckets)


@dataclass(frozen=True)
class Foundations:
    link: LinkSpeed
    machine: Machine


def predict(program: Program, costs: StepCosts, stands_on: str = "") -> Prediction:
    simulation = simulate(program, costs.durations(program))
    sent = dict.fromkeys((flight.bucket, flight.kind) for flight in simulation.flights)
    return Prediction(
        step_ms=1e3 * simulation.seconds,
        compute_ms=_mean_ms(simulation, (Kind.REGION,)),
        update_ms=_mean_ms(simulation, (Kind.UPDATE, Kind.WRITE)),
        buckets=tuple(PredictedBucket(*key, 1e3 * simulation.exposed_seconds(*key)) for key in sent),
        stands_on=stands_on,
    )


def predicted_of_steps(program: Program, steps: Sequence[RecordedStep], foundations: Foundations) -> Prediction | None:
    costs = costs_of_steps(program, steps, foundations.machine, foundations.link)
    stands_on = (
        "times of regions, packs, launches, updates and the commit in these very steps; a link of "
        f"{foundations.link}, as measured when the workers connected; other workers as fast as this one"
    )
    try:
        return predict(program, costs, stands_on)
    except UnknownCostError:
        return None


_NOMINAL_LINK = LinkSpeed(latency_seconds=1e-4, seconds_per_byte=1e-9)


def predicted_step(program: Program, machine: Machine) -> tuple[RecordedStep, str]:
    """Simulates a program that has not run: the step, and its inputs in words. Raises `UnknownCostError`."""
    works = works_of_regions(program, machine)
    graphs = [module.graph for module in program.device_graphs.values()]
    paces: list[Mapping[str, Pace]] = []
    for graph in graphs:
        seconds = {
            phase: [works[region_of(n)] for n in nodes] for phase, nodes in calls_by_phase(program, graph).items()
        }
        paces.append({phase: Pace.of(of_regions, of_regions) for phase, of_regions in seconds.items()})
    calls = (
        node for graph in graphs for node in graph.nodes if node.op == "call_function" and not is_region_call(node)
    )
    lines = {kind_of_call(program, node): Line(seconds_per_byte=machine.seconds_per_byte) for node in calls}
    costs = StepCosts((0.0,) * len(graphs), tuple(paces), lines, machine, _NOMINAL_LINK)
    simulation = simulate(program, costs.durations(program))
    device_calls = [
        tuple(Call(call.node, nanoseconds(call.start), nanoseconds(call.end)) for call in calls)
        for calls in simulation.calls
    ]
    workers = f"; a link between workers of {_NOMINAL_LINK}" if program.workers.are_several else ""
    stands_on = f"multiplications and bytes of operators, as fast as on one core of the machine that predicts{workers}"
    return RecordedStep(False, 0, (0,) * len(graphs), tuple(device_calls)), stands_on


def _mean_ms(simulation: Simulation, kinds: Sequence[Kind]) -> float:
    seconds = 0.0
    for device_calls in simulation.calls:
        for call in device_calls:
            operation = operation_of(call.node.target)
            kind = Kind.REGION if is_region_call(call.node) else operation.kind if operation is not None else None
            seconds += (call.end - call.start) if kind in kinds else 0.0
    return 1e3 * seconds / len(simulation.calls)


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
    begins = [statistics.fmean((step.started_ns[r] - step.begun_ns) / 1e9 for step in steps) for r in replicas]
    return StepCosts(tuple(begins), tuple(paces), _lines(program, seconds), machine, link)


def _seconds_of_calls(steps: Sequence[RecordedStep], replica: int) -> dict[fx.Node, float]:
    """Means of the calls' seconds, without waits for other devices."""
    seconds: defaultdict[fx.Node, list[float]] = defaultdict(list)
    for step in steps:
        skews = skews_ns(step, replica)
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
            is_wait = node.target is ops.wait and node.all_input_nodes[0].target in ops.BETWEEN_WORKERS
            if is_region_call(node) or is_wait:
                continue
            points[kind_of_call(program, node)].append((num_bytes_of_call(program, replica, node), took))
    return {kind: Line.through(kind_points) for kind, kind_points in points.items()}
