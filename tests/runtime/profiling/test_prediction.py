"""What is learned from steps of one plan of buckets foretells steps of other plans, where calls take what is assumed."""

from dataclasses import dataclass, replace

import pytest
from tiny_programs import Weight, handmade
from torch import fx

from mirrorc import World
from mirrorc.analysis.cost.link_speed import LinkSpeed, ring_all_reduce
from mirrorc.analysis.cost.simulation import Simulation, simulate
from mirrorc.analysis.cost.step_costs import Pace, UnknownCostError, num_bytes_of_call, works_of_regions
from mirrorc.analysis.cost.work import Machine
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, is_region_call, region_of
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.prediction import Foundations, costs_of_steps, predict
from mirrorc.runtime.profiling.recorder import Call, RecordedStep

MACHINE = Machine(1e-11, 1e-9)
LINK = LinkSpeed(latency_seconds=1e-4, seconds_per_byte=1e-8)
WEIGHTS = tuple(Weight(f"layer{number}", (256 * (number + 1), 256)) for number in range(6))  # 256 KiB to 1.5 MiB


def program_of(devices: int, cap_mb: float, first_mb: float = 0.5, *, is_dealt: bool = False) -> Program:
    workers = replace(World(2, devices).worker(0), shards_optimizer=is_dealt)
    sizes = {"buckets": ByBytes(cap_mb, first_mb)}
    pipeline = default_pipeline(over_workers=True, shard_optimizer=is_dealt, **sizes)  # type: ignore[arg-type]
    return run_passes(handmade(devices, WEIGHTS).evolve(workers=workers), pipeline)


@dataclass(frozen=True)
class Truth:
    """Regions take three times what they are estimated to; other calls some time, and some for each byte."""

    program: Program
    works: dict[str, float]

    def start_seconds(self, replica: int) -> float:
        return 1e-4 * replica

    def seconds_of(self, replica: int, node: fx.Node) -> float:
        if is_region_call(node):
            return 3 * self.works[region_of(node)]
        if node.target in (ops.update, ops.pack):
            return 2e-5 + 1e-9 * num_bytes_of_call(self.program, replica, node)
        if (
            node.target is ops.wait and node.all_input_nodes[0].target is ops.scatter_sums
        ):  # it adds one part to the other
            start, stop = self.program.buckets[bucket_of(node)].updated(replica, self.program.num_replicas)
            return 3 * 4 * (stop - start) * MACHINE.seconds_per_byte
        return 3e-5 if node.target is ops.commit else 0.0

    def flight_seconds(self, node: fx.Node) -> float:
        whole = LINK.seconds_of(ring_all_reduce(self.program.buckets[bucket_of(node)].num_bytes, 2))
        return whole if node.target is ops.exchange else whole / 2  # sums of parts, or new parameters


def truth(program: Program) -> Simulation:
    return simulate(program, Truth(program, works_of_regions(program, MACHINE)))


def recorded(program: Program, *, warms_up: bool = False) -> RecordedStep:
    found = truth(program)
    calls = tuple(tuple(Call(c.node, round(c.start * 1e9), round(c.end * 1e9)) for c in own) for own in found.calls)
    return RecordedStep(warms_up, 0, tuple(own[0].start_ns for own in calls), calls)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("learned", [0.5, 2.0])
@pytest.mark.parametrize("is_dealt", [False, True])
def test_steps_of_other_plans_are_foretold(devices: int, learned: float, is_dealt: bool) -> None:
    known = program_of(devices, learned, is_dealt=is_dealt)
    costs = costs_of_steps(known, [recorded(known)], MACHINE, LINK)
    for cap, first in ((0.5, 0.5), (1.0, 0.5), (2.0, 2.0), (25.0, 1.0), (25.0, 25.0)):
        program = program_of(devices, cap, first, is_dealt=is_dealt)
        assert predict(program, costs).step_ms == pytest.approx(1e3 * truth(program).seconds, rel=0.02), (cap, first)


def test_a_step_is_foretold_from_itself_and_shown_beside_what_was_measured() -> None:
    program = program_of(1, 1.0)
    steps = [recorded(program, warms_up=True), recorded(program)]
    found = explain_steps(program, steps, foundations=Foundations(LINK, MACHINE))
    assert found.prediction is not None
    assert found.prediction.step_ms == pytest.approx(found.step_ms, rel=1e-3)
    assert found.prediction.compute_ms == pytest.approx(found.compute_ms, rel=1e-3)
    for own, measured in zip(found.prediction.buckets, found.buckets, strict=True):
        assert (own.index, own.kind) == (measured.index, measured.kind)
        assert own.exposed_ms == pytest.approx(measured.exposed_ms, rel=1e-3, abs=1e-3)
    assert found.prediction.exposed_ms == pytest.approx(
        found.exposed_ms - 0.03, rel=1e-2
    )  # the commit is one by itself
    told = str(found)
    assert "simulation, ms   predicted  measured\nstep " in told and "\nb0 exposed " in told
    assert "in these very steps; a link of 100 MB/s and 0.10 ms for a message, as measured when" in " ".join(
        told.split()
    )
    assert "simulation" not in str(explain_steps(program, steps))


def test_what_nobody_knows_is_not_foretold() -> None:
    program = program_of(1, 1.0)
    costs = costs_of_steps(program, [recorded(program)], MACHINE, LINK)

    def exchange_otherwise() -> None:
        pass

    with pytest.raises(UnknownCostError, match="it is not known how long exchange_otherwise takes between workers"):
        costs.durations(program).flight_seconds(fx.Graph().call_function(exchange_otherwise, (), {"bucket": 0}))


def test_a_pace_is_kept_by_other_cuts() -> None:
    pace = Pace.of([1.0, 3.0], [2.0, 2.0])  # a quarter of the work takes half of the time
    assert [pace.at(part) for part in (0.0, 0.125, 0.25, 0.625, 1.0)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert Pace.of([0.0, 0.0], [1.0, 3.0]).at(0.5) == 1.0  # nothing but views
    assert Pace.of([0.0, 2.0], [1.0, 3.0]).at(1.0) == 4.0
