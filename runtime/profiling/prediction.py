"""Predicts the duration of a step, and the wait for each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.analysis.cost.simulation import Simulation, simulate
from mirrorc.analysis.cost.step_costs import StepCosts, UnknownCostError
from mirrorc.analysis.cost.work import Machine
from mirrorc.ir.nodes import is_region_call
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program
from mirrorc.runtime.profiling.calibration import costs_of_steps
from mirrorc.runtime.profiling.recorder import RecordedStep


@dataclass(frozen=True)
class PredictedBucket:
    """The predicted wait for other workers, as a mean over devices; ``kind`` is the launch's operation."""

    index: int
    kind: str
    exposed_ms: float


@dataclass(frozen=True)
class Prediction:
    """Simulated step over several workers. Times are means over devices.

    Attributes:
        step_ms: from the start of the first device to the end of the last.
        compute_ms: in regions.
        update_ms: in the optimizer and in writing variables.
        buckets: in the order of their launches.
        stands_on: its inputs, in words.
    """

    step_ms: float
    compute_ms: float
    update_ms: float
    buckets: tuple[PredictedBucket, ...]
    stands_on: str

    @property
    def exposed_ms(self) -> float:
        """The time in waits for other workers."""
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
    """A prediction; None if the cost of an operation is unknown."""
    costs = costs_of_steps(program, steps, foundations.machine, foundations.link)
    stands_on = (
        "times of regions, packs, launches, updates and the commit in these very steps; a link of "
        f"{foundations.link}, as measured when the workers connected; other workers as fast as this one"
    )
    try:
        return predict(program, costs, stands_on)
    except UnknownCostError:
        return None


def _mean_ms(simulation: Simulation, kinds: Sequence[Kind]) -> float:
    seconds = 0.0
    for device_calls in simulation.calls:
        for call in device_calls:
            operation = operation_of(call.node.target)
            kind = Kind.REGION if is_region_call(call.node) else operation.kind if operation is not None else None
            seconds += (call.end - call.start) if kind in kinds else 0.0
    return 1e3 * seconds / len(simulation.calls)
