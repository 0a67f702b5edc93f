"""Simulated steps over several workers: the textbook's cases, and what holds for any times."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import SMALL_BUCKETS, Weight, handmade
from torch import fx

from mirrorc import World
from mirrorc.analysis.cost.link_speed import LinkSpeed, fitted_speed, ring_all_gather, ring_all_reduce, ring_all_to_all
from mirrorc.analysis.cost.simulation import simulate
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, call_name, is_region_call
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes

TWO = (Weight("fc1", (64, 1024)), Weight("fc2", (1024,)))  # bucket 0 has fc2, 4 KiB; bucket 1 fc1, 256 KiB
NUM_BYTES = (4096, 262144)


def program_of(devices: int = 1, workers: int = 2, **options: Any) -> Program:
    captured = handmade(devices, TWO).evolve(workers=World(workers, devices).worker(0))
    return run_passes(captured, default_pipeline(over_workers=True, **(SMALL_BUCKETS | options)))


@dataclass(frozen=True)
class Given:
    """Durations by the names of calls, in seconds; calls that are not named take none. ``late`` is added on the last replica."""

    program: Program
    link: LinkSpeed
    by_name: Mapping[str, float]
    late: float = 0.0

    def start_seconds(self, replica: int) -> float:
        return self.late if replica and replica == self.program.num_replicas - 1 else 0.0

    def seconds_of(self, replica: int, node: fx.Node) -> float:
        return self.by_name.get(call_name(node), 0.0)

    def flight_seconds(self, node: fx.Node) -> float:
        num_bytes = self.program.buckets[bucket_of(node)].num_bytes
        return self.link.seconds_of(ring_all_reduce(num_bytes, self.program.workers.num_workers))


CALLS = {"fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0, "update b0": 1.0, "update b1": 1.5}


def test_a_link_without_limits_gives_the_time_of_what_devices_do() -> None:
    for devices in (1, 2):
        program = program_of(devices)
        found = simulate(program, Given(program, LinkSpeed(0.0, 0.0), CALLS))
        assert found.seconds == sum(CALLS.values()) and found.exposed_seconds(0, "exchange") == 0.0


def test_one_bucket_is_exposed_for_its_bytes_and_a_round_trip() -> None:
    program = program_of(buckets=ByBytes(25.0, 25.0))
    assert [bucket.num_bytes for bucket in program.buckets] == [sum(NUM_BYTES)]
    link = LinkSpeed(latency_seconds=0.25, seconds_per_byte=2.0**-16)
    found = simulate(program, Given(program, link, {"fwd_0": 4.0, "bwd_0": 5.0, "update b0": 1.0}))
    sent = sum(NUM_BYTES) / 2**16  # two workers send, and receive, as many bytes as there are
    assert found.exposed_seconds(0, "exchange") == sent + 2 * 0.25
    assert found.seconds == 10.0 + sent + 2 * 0.25


def test_a_bucket_that_fits_into_the_rest_of_backward_is_hidden() -> None:
    program = program_of(early_update=False)
    link = LinkSpeed(0.0, 3.0 / NUM_BYTES[0])  # bucket 0 takes as long as bwd_1
    found = simulate(program, Given(program, link, CALLS))
    assert found.exposed_seconds(0, "exchange") == 0.0
    assert found.exposed_seconds(1, "exchange") == 3.0 * 64
    assert [(f.bucket, f.launched, f.begun, f.arrived) for f in found.flights] == [(0, 6, 6, 9), (1, 9, 9, 9 + 192)]


def test_a_bucket_waits_until_the_one_before_has_arrived() -> None:
    program = program_of()
    link = LinkSpeed(0.0, 6.0 / NUM_BYTES[0])
    first, second = simulate(program, Given(program, link, CALLS)).flights
    assert (first.launched, first.arrived) == (6.0, 12.0) and (second.launched, second.begun) == (9.0, 12.0)


def test_a_late_device_delays_what_both_launch() -> None:
    program = program_of(2)
    link = LinkSpeed(0.0, 1.0 / NUM_BYTES[0])
    on_time, late = (simulate(program, Given(program, link, CALLS, late)) for late in (0.0, 2.0))
    assert late.flights[0].launched == on_time.flights[0].launched + 2.0
    assert late.seconds == on_time.seconds + 2.0


def test_waits_follow_the_graph_and_not_a_plan_of_ours() -> None:
    """A bucket that is updated while the next one is in flight hides what that takes."""
    link = LinkSpeed(0.0, 1.0 / NUM_BYTES[0])
    early, late = (
        simulate(program, Given(program, link, CALLS)).seconds
        for program in (program_of(), program_of(early_update=False))
    )
    assert late - early == CALLS["update b0"]


TIMES = st.floats(0.0, 10.0)


@fuzzed(60)
@given(
    st.sampled_from([(1, 2), (2, 2), (1, 3)]),
    TIMES,
    TIMES,
    st.dictionaries(st.sampled_from(sorted(CALLS)), TIMES),
    TIMES,
)
def test_steps_become_no_longer_on_a_better_link(
    shape: tuple[int, int], latency: float, per_byte: float, calls: Mapping[str, float], late: float
) -> None:
    program = PROGRAMS[shape]

    def seconds(link: LinkSpeed) -> float:
        return simulate(program, Given(program, link, calls, late)).seconds

    worse = seconds(LinkSpeed(latency, per_byte))
    assert seconds(LinkSpeed(latency, per_byte / 2)) <= worse
    assert seconds(LinkSpeed(latency / 2, per_byte)) <= worse
    one_device = max(sum(calls.values()), 0.0) + (late if shape[0] > 1 else 0.0)
    assert seconds(LinkSpeed(0.0, 0.0)) == pytest.approx(one_device)
    whole = sum(Given(program, LinkSpeed(latency, per_byte), {}).flight_seconds(n) for n in exchanges(program))
    assert worse <= one_device + whole + 1e-6 * (1 + whole)  # nothing hidden is the worst


def exchanges(program: Program) -> list[fx.Node]:
    graph = next(iter(program.device_graphs.values())).graph
    return list(graph.find_nodes(op="call_function", target=ops.exchange))


PROGRAMS = {shape: program_of(*shape) for shape in ((1, 2), (2, 2), (1, 3))}


def test_every_region_is_called_in_its_order() -> None:
    program = PROGRAMS[2, 2]
    found = simulate(program, Given(program, LinkSpeed(0.0, 0.0), CALLS))
    for own in found.calls:
        assert [call_name(call.node) for call in own if is_region_call(call.node)] == ["fwd_0", "bwd_0", "bwd_1"]
        assert all(call.end >= call.start for call in own)


def test_a_ring_sends_what_the_textbook_says() -> None:
    link = LinkSpeed(latency_seconds=1.0, seconds_per_byte=0.5)
    assert link.seconds_of(ring_all_reduce(100, 2)) == 2 * (1.0 + 25.0)
    assert link.seconds_of(ring_all_reduce(100, 4)) == 6 * (1.0 + 12.5)
    assert link.seconds_of(ring_all_gather(100, 4)) == 3 * (1.0 + 50.0)
    assert link.seconds_of(ring_all_to_all(100, 4)) == 3 * (1.0 + 12.5)
    assert all(link.seconds_of(ring(100, 1)) == 0.0 for ring in (ring_all_reduce, ring_all_gather, ring_all_to_all))


@pytest.mark.parametrize("num_workers", [2, 5])
def test_the_speed_of_a_link_is_told_from_sums(num_workers: int) -> None:
    link = LinkSpeed(latency_seconds=0.25, seconds_per_byte=2.0**-20)
    credit = 0.125  # what a bucket of tokens lets pass at once
    sums = [(size, link.seconds_of(ring_all_reduce(size, num_workers)) - credit) for size in (2**20, 2**22)]
    found = fitted_speed(*sums, link.seconds_of(ring_all_reduce(0, num_workers)), num_workers)
    assert found.seconds_per_byte == pytest.approx(link.seconds_per_byte) and found.latency_seconds == 0.25
    noisy = fitted_speed((2**20, 1.0), (2**22, 0.5), 0.0, num_workers)  # the larger sum was faster
    assert noisy.seconds_per_byte > 0


def test_devices_that_wait_for_each_other_in_a_circle_are_told_of() -> None:
    program = program_of(2)
    graph = list(program.device_graphs.values())[1].graph
    for commit in graph.find_nodes(op="call_function", target=ops.commit):
        graph.erase_node(commit)  # the other device waits for it
    with pytest.raises(ValueError, match="wait for each other in a circle"):
        simulate(program, Given(program, LinkSpeed(0.0, 0.0), CALLS))
