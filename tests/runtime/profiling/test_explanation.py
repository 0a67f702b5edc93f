"""Handmade records: what each figure is, exactly, and what is advised."""

import operator
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade
from torch import fx

from mirrorc.all_reduce_algorithms import Ring
from mirrorc.ir import ops
from mirrorc.ir.links import Link, register_link, unregister_link
from mirrorc.ir.nodes import call_name, is_region_call
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.profiling import start
from mirrorc.runtime.profiling.accounting import apportioned
from mirrorc.runtime.profiling.advice import advise
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.figures import BucketTimes
from mirrorc.runtime.profiling.recorder import Call, RecordedStep

MS = 10**6  # nanoseconds
Durations = Mapping[str, float]  # milliseconds of calls by name; others take none; of a wait, after the last launch
TWO = (Weight("fc1", (64, 1024)), Weight("fc2", (1024,)))  # bucket 0 has fc2, 4 KiB; bucket 1 fc1, 256 KiB
MEBIBYTE = 2**18  # elements of float32


def program_of(
    num_devices: int = 2,
    weights: Sequence[Weight] = TWO,
    *,
    without: Sequence[str] = (),
    link: str | None = None,
    uneven: bool = False,
    **options: Any,
) -> Program:
    """A lowered program with a bucket for each weight; ``link`` in place of what carries its collectives."""
    passes = [one for one in default_pipeline(**{**SMALL_BUCKETS, **options}) if one.name not in without]  # type: ignore[arg-type]
    program = run_passes(handmade(num_devices, weights, uneven=uneven), passes)
    for graph in program.graphs():
        for node in graph.nodes:
            if link is not None and "link" in node.kwargs:
                node.kwargs = {**node.kwargs, "link": link}
    return program


def called(graph: fx.Graph) -> list[fx.Node]:
    silent = (ops.read, ops.slot, operator.getitem)
    return [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target not in silent]


def is_awaited(pending: fx.Node, replica: int, launch: fx.Node, of: int) -> bool:
    if launch.kwargs.get("bucket") != pending.kwargs["bucket"]:
        return False
    if pending.target is ops.recv:
        hop = (launch.target is ops.send, of, launch.kwargs.get("destination"))
        tags = [[node.kwargs.get(word, 0) for word in ("round", "chunk")] for node in (launch, pending)]
        return hop == (True, pending.kwargs["source"], replica) and tags[0] == tags[1]
    return launch.target is pending.target


def recorded(program: Program, *durations: Durations, warms_up: bool = False, begun_ms: float = 0.0) -> RecordedStep:
    """A step as it would be recorded: a wait ends so many ms after the last launch that it needs, or after it begins."""
    todo = [called(module.graph) for module in program.device_graphs.values()]
    now = [round((begun_ms + own.get("start", 0.0)) * MS) for own in durations]
    started, calls = tuple(now), [[] for _ in todo]  # type: ignore[var-annotated]
    ends: dict[tuple[int, fx.Node], int] = {}
    while any(todo):
        for replica, nodes in enumerate(todo):
            while nodes:
                begins = now[replica]
                if nodes[0].target is ops.wait:
                    pending = nodes[0].args[0]
                    needed = [(r, n) for r, m in enumerate(program.device_graphs.values()) for n in called(m.graph)]
                    needed = [(r, n) for r, n in needed if is_awaited(pending, replica, n, r)]  # type: ignore[arg-type]
                    if any(key not in ends for key in needed):
                        break
                    begins = max([begins, *(ends[key] for key in needed)])
                node = nodes.pop(0)
                end = begins + round(durations[replica].get(call_name(node), 0.0) * MS)
                calls[replica].append(Call(node, now[replica], end))
                ends[replica, node] = now[replica] = end
    return RecordedStep(warms_up, round(begun_ms * MS), started, tuple(map(tuple, calls)))


def explained(program: Program, *durations: Durations) -> Explanation:
    return explain_steps(program, [recorded(program, *durations)])


def figures(times: BucketTimes) -> tuple[float, ...]:
    names = ("ready", "launched", "waited", "finished", "hidden", "exposed", "skew", "transfer")
    return tuple(getattr(times, f"{name}_ms") for name in names)


EVEN = {"start": 1.0, "fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0, "pack b0": 0.5, "reduce_scatter b1": 0.25}
SIZED = {
    "start": 1.0,
    "fwd_0": 4.0,
    "bwd_0": 2.0,
    "bwd_1": 3.0,
    "wait b1": 1.0,
    "update b1": 2.0,
}  # bucket 0 is for free
DONE = {"wait b1": 1.0, "update b1": 2.0, "wait b0": 0.5, "update b0": 1.0}


def test_every_figure_of_even_devices() -> None:
    """Each runs start 1, fwd_0 5, bwd_0 7, pack 7.5, bwd_1 10.5, launch 10.75, wait b1 11.75, 13.75, wait b0 14.25, 15.25."""
    found = explained(program_of(), EVEN | DONE, EVEN | DONE)
    first, second = found.buckets
    assert (first.index, first.num_bytes, first.kind, first.link) == (0, 4096, "reduce_scatter", "shared-memory")
    assert figures(first) == (7.0, 7.5, 13.75, 14.25, 0.0, 0.5, 0.0, 0.5)
    assert figures(second) == (10.5, 10.75, 10.75, 11.75, 0.0, 1.0, 0.0, 1.0)
    assert (first.behind, second.behind) == ("wait b1", "")
    assert (found.num_steps, found.step_ms, found.compute_ms, found.update_ms) == (1, 15.25, 9.0, 3.0)
    assert (found.exposed_ms, found.hidden_ms, found.other_ms) == (1.5, 0.0, 1.75)
    for device, own in zip(found.devices, first.devices, strict=True):
        assert own.device == device.device and figures(own) == figures(first)  # type: ignore[arg-type]
        assert (device.started_ms, device.compute_ms, device.exposed_ms) == (1.0, 9.0, 1.5)
        assert (device.update_ms, device.finished_ms) == (3.0, 15.25)
        assert device.region_ms == {"fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0}
        assert device.parts_ms == found.parts_ms == {
            "start": 1.0, "forward": 4.0, "backward": 5.0, "pack": 0.5, "launch": 0.25, "commit": 0.0, "skew": 0.0,
            "transfer": 1.5, "update": 3.0, "write": 0.0, "other": 0.0, "end": 0.0,
        }  # fmt: skip


def test_waiting_at_the_commit_is_a_part_of_its_own_and_counts_in_the_advice() -> None:
    found = explained(program_of(), EVEN | DONE | {"commit": 6.0}, EVEN | DONE | {"bwd_1": 9.0})
    assert [(device.parts_ms["commit"], device.parts_ms["skew"]) for device in found.devices] == [
        (6.0, 0.0),
        (0.0, 0.0),
    ]
    assert found.other_ms == 4.75 and found.exposed_ms == 1.5
    assert found.advice.startswith("even out the devices: cpu:1 computes for 15.000 ms, cpu:0 for 9.000 ms")
    assert found.advice.endswith("Estimated gain: 3.000 ms a step.")


def test_only_a_link_that_moves_by_itself_hides_anything() -> None:
    found = explained(program_of(2, link="nccl"), EVEN | DONE, EVEN | DONE)
    assert figures(found.buckets[0]) == (7.0, 7.5, 13.75, 14.25, 6.25, 0.5, 0.0, 0.5) and found.hidden_ms == 6.25
    assert "  hidden behind other work: 6.25 ms, summed over buckets\n" in str(found)


def test_a_late_device_is_named_and_costs_the_others_skew() -> None:
    late = EVEN | {"bwd_1": 9.0}
    found = explained(program_of(), EVEN | DONE, late | DONE)
    first, second = found.buckets
    assert second.behind == "cpu:1's bwd_1" and first.behind == "wait b1"
    assert (second.ready_ms, second.launched_ms, second.waited_ms, second.finished_ms) == (13.5, 13.75, 13.75, 17.75)
    assert (second.skew_ms, second.transfer_ms, second.exposed_ms) == (3.0, 1.0, 4.0)
    assert [own.skew_ms for own in second.devices] == [6.0, 0.0]
    assert (first.skew_ms, first.transfer_ms) == (0.0, 0.5)
    assert found.advice == (
        "even out the devices: cpu:1 computes for 15.000 ms, cpu:0 for 9.000 ms, 6.000 ms more in bwd_1: see what else runs "
        "on the cores of cpu:1. Estimated gain: 3.000 ms a step."
    )


def test_a_larger_shard_is_named_as_the_reason() -> None:
    program = program_of(3, uneven=True)
    names = [call_name(node) for node in called(program.device_graphs["cpu:2"].graph) if is_region_call(node)]
    assert "fwd_0.shard1" in names, "the last replica's forward is of another shape"
    found = explained(program, EVEN | DONE, EVEN | DONE, EVEN | DONE | {"fwd_0.shard1": 9.0})
    assert found.advice.startswith(
        "even out the devices: cpu:2 computes for 14.000 ms, the others on average for 9.000 ms, and shards differ in shape: "
        "give every device as many examples, of the same length. Estimated gain: 3.333 ms"
    )


@pytest.mark.parametrize(
    ("sizes", "advised"),
    [
        ((3, 2, 2), "as many examples, by a batch of 6 or 9 or another multiple of 3"),
        ((1, 1, 0), "as many examples, by a batch of 3 or another multiple of 3"),
        ((2, 2, 2), "examples of the same length"),
    ],
)
def test_the_advice_on_uneven_shards_names_batch_sizes_that_are_even(sizes: tuple[int, ...], advised: str) -> None:
    program = program_of(3, uneven=True).evolve(num_examples=sizes)
    found = explained(program, EVEN | DONE, EVEN | DONE, EVEN | DONE | {"fwd_0.shard1": 9.0})
    assert f": give every device {advised}. Estimated gain: 3.333 ms" in found.advice


def test_the_gain_of_even_devices_is_what_the_last_device_at_the_commit_computes_too_long() -> None:
    """Not what others wait for a device that begins late, nor less where a wait before the commit has the unevenness."""
    slow = EVEN | DONE | {"bwd_1": 9.0}
    late = explained(program_of(3), slow, EVEN | DONE | {"start": 12.0}, EVEN | DONE)
    assert late.devices[0].parts_ms["skew"] > 0 and "even out" not in late.advice
    begins_later = explained(program_of(), slow | {"start": 3.0}, EVEN | DONE | {"start": 1.0})
    assert begins_later.advice.startswith("even out the devices: cpu:0") and "gain: 3.000 ms" in begins_later.advice
    last_by_start = explained(program_of(), slow, EVEN | DONE | {"start": 6.0})
    assert "cpu:1 computes" not in last_by_start.advice
    early = program_of(2, check_finite=True, without=["share-parameters"])
    waits = [node.target for node in called(early.graphs()[0]) if node.target in (ops.wait, ops.commit)]
    assert waits[-1] is ops.commit, "all sums are waited for before the commit"
    found = explained(early, slow, EVEN | DONE)
    assert found.parts_ms["commit"] < 1.0 and "gain: 3.000 ms" in found.advice


def test_a_device_that_starts_late_is_named() -> None:
    found = explained(program_of(), SIZED, SIZED | {"start": 5.0, "fwd_0": 1.0, "bwd_1": 6.0})
    assert found.buckets[1].skew_ms == 2.0 and found.buckets[1].behind == "cpu:1's bwd_1"
    assert "2.000 ms are waiting for the last device (cpu:1 starts 4.000 ms after cpu:0)" in found.advice
    assert found.advice.startswith("nothing to change: of 3.000 ms in waits and the commit")


def test_a_device_that_has_not_started_yet_is_late_by_its_start() -> None:
    found = explained(program_of(), EVEN | DONE, EVEN | DONE | {"start": 40.0})
    assert found.buckets[1].behind == "cpu:1's start"
    assert found.devices[1].started_ms == 40.0


def test_devices_that_are_late_by_turns() -> None:
    """The mean is taken of figures that are made for each step, not of the times that they are made from: those would hide it."""
    program = program_of()
    slow, quick = SIZED | {"bwd_1": 9.0}, SIZED
    steps = [recorded(program, *((slow, quick) if i % 2 else (quick, slow))) for i in range(6)]
    found = explain_steps(program, steps)
    second = found.buckets[1]
    assert (second.skew_ms, second.transfer_ms, second.launched_ms) == (3.0, 1.0, 13.0)
    assert [device.compute_ms for device in found.devices] == [12.0, 12.0]
    assert found.advice.startswith(
        "nothing to change: of 4.000 ms in waits and the commit, 3.000 ms are waiting for the last device, 1.000"
    )


def test_figures_are_means_over_the_middle_third_of_steps_and_the_first_step_is_left_out() -> None:
    program = program_of()

    def step(number: int, bwd_ms: float) -> RecordedStep:
        own = EVEN | DONE | {"bwd_0": bwd_ms}
        return recorded(program, own, own, warms_up=number == 0, begun_ms=100.0 * number)

    assert explain_steps(program, [step(0, 2.0)]).num_steps == 1
    found = explain_steps(program, [step(0, 500.0), step(1, 2.0), step(2, 90.0), step(3, 3.0)])
    assert (found.num_steps, found.compute_ms, found.step_ms, found.buckets[0].ready_ms) == (3, 10.0, 16.25, 8.0)


@pytest.fixture
def ether() -> Iterator[str]:
    register_link(Link("ether", moves_by_itself=True))
    yield "ether"
    unregister_link("ether")


HALVES = [
    Weight("fc1", (MEBIBYTE,)),
    Weight("fc2", (3, MEBIBYTE)),
    Weight("fc3", (4, MEBIBYTE)),
    Weight("fc4", (1024,)),
]


@pytest.mark.parametrize("link", ["nccl", "ether"])
@pytest.mark.usefixtures("ether")
def test_a_last_bucket_that_nothing_hides(link: str) -> None:
    """Bucket 0 is of 4 KiB and arrives meanwhile; bucket 1, of 8 MiB in equal halves, takes 4 ms after backward."""
    program = program_of(2, HALVES, link=link, buckets=ByBytes(8, 0.05))
    assert [bucket.num_bytes for bucket in program.buckets] == [4096, 8 * 2**20]
    own = {"fwd_0": 4.0, "bwd_0": 1.0, "bwd_1": 9.0, "wait b1": 4.0}
    found = explained(program, own, own)
    assert found.buckets[1].behind == "" and found.buckets[1].transfer_ms == 4.0
    assert found.advice == (
        "a smaller last bucket, 4.0 MiB instead of 8.0 MiB: nothing is left to hide it (communication=mirrorc.Communication("
        "buckets=4)). Estimated gain: "
        "2.000 ms a step."
    )


def test_no_smaller_last_bucket_on_a_link_that_moves_nothing_before_the_wait() -> None:
    program = program_of(2, HALVES, buckets=ByBytes(8, 0.05))
    own = {"fwd_0": 4.0, "bwd_0": 1.0, "bwd_1": 9.0, "wait b1": 4.0}
    found = explained(program, own, own)
    assert found.buckets[1].transfer_ms == 4.0 and found.advice.startswith(
        "nothing to change: of 4.000 ms in waits and the commit, 0.000"
    )


def test_a_last_bucket_of_one_gradient_cannot_be_cut() -> None:
    program = program_of(2, [Weight("fc1", (8, MEBIBYTE)), TWO[1]], link="nccl")
    own = {"fwd_0": 4.0, "bwd_0": 1.0, "bwd_1": 9.0, "wait b1": 4.0}
    assert explained(program, own, own).advice.startswith("nothing to change")


def test_no_fewer_buckets_where_the_last_one_would_hide_less() -> None:
    """Each of eight buckets costs 0.2 ms whatever its size, and a MiB 1 ms: of one for all, 5.5 ms would be left, not 1."""
    sizes = [MEBIBYTE, *(MEBIBYTE * 9 // 16 + i for i in range(6)), MEBIBYTE // 4]
    program = program_of(2, [Weight(f"fc{i}", (size,)) for i, size in enumerate(sizes)], link="nccl")
    own = {"fwd_0": 30.0, "wait b7": 1.0} | {f"pack b{i}": 0.2 for i in range(8)}
    assert explained(program, own, own).advice.startswith("nothing to change: of 1.000 ms in waits and the commit")


def test_a_wait_that_ends_before_the_launch_it_needs_has_returned() -> None:
    """The last device is heard of in the midst of its launch: no more is skew than was waited."""
    program = program_of()
    step = recorded(program, EVEN, EVEN | {"bwd_1": 9.0})
    first, last = step.calls
    wait = next(i for i, call in enumerate(first) if call.node.target is ops.wait)
    begin = first[wait].start_ns
    cut = [Call(call.node, min(call.start_ns, begin + MS), min(call.end_ns, begin + MS)) for call in first[wait:]]
    found = explain_steps(program, [RecordedStep(False, 0, step.started_ns, ((*first[:wait], *cut), last))])
    own = found.buckets[1].devices[0]
    assert (own.skew_ms, own.transfer_ms, own.exposed_ms) == (1.0, 0.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["shared-memory", "nccl"])
def test_many_tiny_buckets(link: str) -> None:
    """Twenty buckets cost 0.1 ms for their waits and 0.2 ms for an update on one of the two devices, whatever their size."""
    program = program_of(2, [Weight(f"fc{i}", (i + 1,)) for i in range(20)], link=link)
    own = {"fwd_0": 1.0} | {f"wait b{i}": 0.1 for i in range(20)} | {f"update b{i}": 0.2 for i in range(20)}
    found = explained(program, own, own)
    assert len(found.buckets) == 20 and found.exposed_ms == pytest.approx(2.0)
    assert (
        found.advice.startswith("fewer buckets, 1 instead of 20: each costs 0.")
        and "(communication=mirrorc.Communication(buckets=mirrorc.packing.ByBytes(25, 25)))" in found.advice
    )
    if link == "shared-memory":  # elsewhere, buckets are under way while others are updated
        assert "each costs 0.200 ms" in found.advice and found.advice.endswith("Estimated gain: 3.798 ms a step.")


def test_buckets_of_different_rules_stay_apart() -> None:
    other = [Weight(f"o{i}", (i + 1,), rule=MUON) for i in range(2)]
    program = program_of(2, [*(Weight(f"fc{i}", (i + 3,)) for i in range(8)), *other])
    own = {"fwd_0": 1.0} | {f"wait b{i}": 0.5 for i in range(10)}
    assert explained(program, own, own).advice.startswith("fewer buckets, 2 instead of 10: each costs 0.500 ms")


def test_nothing_is_advised_where_little_is_exposed() -> None:
    own = EVEN | {"fwd_0": 400.0} | DONE
    assert (
        explained(program_of(), own, own).advice
        == "nothing worth doing: 1.500 ms in waits and the commit are under 2% of the step."
    )


def test_where_nothing_is_advised_waits_for_the_models_own_collectives_are_told() -> None:
    program = program_of()
    step = recorded(program, EVEN | {"fwd_0": 400.0} | DONE, EVEN | {"fwd_0": 400.0} | DONE)
    found = explain_steps(program, [step])
    devices = [replace(device, exposed_ms=device.exposed_ms + 50.0) for device in found.devices]
    assert advise(program, [step], found.step_ms, found.buckets, devices) == (
        f"{found.advice[:-1]}; the model's own collectives take another 50.000 ms."
    )


def test_one_device() -> None:
    own = {"start": 1.0, "fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0, "update b0": 1.0}
    found = explained(program_of(1), own)
    assert [(bucket.index, bucket.kind, bucket.link, bucket.devices) for bucket in found.buckets] == [
        (0, "none", "", ()),
        (1, "none", "", ()),
    ]
    assert figures(found.buckets[0]) == (7.0, 7.0, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0)
    assert (found.exposed_ms, found.hidden_ms, found.step_ms, found.compute_ms) == (0.0, 0.0, 11.0, 9.0)
    assert found.advice == "nothing to do: one device has nobody to communicate with."
    assert "not communicated" in str(found)


def test_who_is_sent_to_waits_for_the_sender_alone() -> None:
    """An optimizer that runs by itself, on replica 0, whose parameters the others are sent."""
    program = program_of(3, [Weight("fc1", (4,), rule=MUON)], without=["share-parameters"])
    own = {"fwd_0": 1.0, "bwd_0": 1.0, "wait b0": 0.0}
    found = explained(program, own | {"step_optimizer": 6.0}, own | {"store b0": 0.5}, own | {"bwd_0": 2.0})
    reduced, *sent = found.buckets
    assert (reduced.kind, reduced.index, reduced.behind) == ("all_reduce", 0, "cpu:2's bwd_0")
    assert [(one.kind, one.label, one.behind) for one in sent] == [
        ("send", "b0 0→1", "cpu:0's step_optimizer"),
        ("send", "b0 0→2", "cpu:0's step_optimizer"),
    ]
    assert {own.device: own.skew_ms for own in reduced.devices} == {"cpu:0": 1.0, "cpu:1": 1.0, "cpu:2": 0.0}
    for one in sent:
        assert figures(one) == (9.0, 9.0, 3.0, 9.0, 0.0, 2.0, 2.0, 0.0), (
            "launched by the sender, waited for by the receiver"
        )
    assert figures(found.totals[1]) == (9.0, 9.0, 3.0, 9.0, 0.0, 4.0, 4.0, 0.0)
    assert found.update_ms == pytest.approx((6.0 + 0.5) / 3)
    assert "  cpu:0's step_optimizer\n" in str(found), "names are not cut"


def test_messages_have_the_receivers_times_and_are_sorted_below_the_sum_of_their_bucket() -> None:
    program = program_of(3, without=["share-parameters"], algorithm=Ring())
    durations = [{**EVEN, "wait b0": 0.5, "wait b1": 0.25, "start": 1.0 + 2 * replica} for replica in range(3)]
    found = explained(program, *durations)
    places = [(one.index, one.round, one.chunk, one.source) for one in found.buckets]
    assert places == sorted(places) and len(places) == 2 * 4 * 3  # type: ignore[type-var]
    for message in found.buckets:
        by_device = {own.device: own for own in message.devices}
        sender, receiver = by_device[f"cpu:{message.source}"], by_device[f"cpu:{message.destination}"]
        assert (message.ready_ms, message.launched_ms) == (sender.ready_ms, sender.launched_ms)
        assert (message.waited_ms, message.finished_ms) == (receiver.waited_ms, receiver.finished_ms)
        assert message.skew_ms == pytest.approx(receiver.skew_ms / 3) and sender.exposed_ms == 0.0
        assert (
            message.label
            == f"b{message.index} r{message.round} c{message.chunk} {message.source}→{message.destination}"
        )
    assert [total.label for total in found.totals] == ["b0", "b1"]
    for part in ("skew", "transfer"):
        waits = sum(device.parts_ms[part] for device in found.devices) / 3
        assert sum(getattr(total, f"{part}_ms") for total in found.totals) == pytest.approx(waits)
    rows = [line.split("  ")[0] or line.split("  ")[1] for line in str(found).split("\n\n")[1].split("\n")[2:]]
    expected = [label for total in found.totals for label in (total.label, *_labels_of(found, total.index))]
    assert rows == [*expected, "all"]
    check_printed_figures(found)


def _labels_of(found: Explanation, bucket: int) -> list[str]:
    return [one.label for one in found.buckets if one.index == bucket]


@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_fastest_and_the_slowest_step_stand_beside_the_mean(num_steps: int) -> None:
    program = program_of()
    own = [EVEN | DONE | {"bwd_0": 2.0 + 3 * number} for number in range(num_steps)]
    steps = [recorded(program, durations, durations, begun_ms=100.0 * i) for i, durations in enumerate(own)]
    found = explain_steps(program, steps)
    assert (found.fastest_ms["backward"], found.slowest_ms["backward"]) == (5.0, 5.0 + 3 * (num_steps - 1))
    assert ("A step takes 19.75 ms (15.25 … 24.25); the mean of" in str(found)) == (num_steps > 1)
    assert ("\nslowest " in str(found)) == ("\nfastest " in str(found)) == (num_steps > 1)
    check_printed_figures(found)


def test_a_start_that_takes_long_is_explained_and_names_the_last_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_num_cores", lambda: 2)
    assert explained(program_of(), EVEN | DONE, EVEN | DONE).start == ""
    found = explained(program_of(3), EVEN | DONE, EVEN | DONE, EVEN | DONE | {"start": 9.0})
    assert found.start.endswith("cpu:2 is the last, at 9.000 ms: 3 devices share 2 cores")
    assert "\n  start: the caller wakes" in str(found)
    assert "share" not in explained(program_of(), EVEN | DONE, EVEN | DONE | {"start": 9.0}).start
    interleaved = explain_steps(
        program_of(), [recorded(program_of(), EVEN, EVEN | {"start": 9.0})], is_interleaved=True
    )
    assert "take turns" in interleaved.start


def test_many_devices_are_named_as_a_range() -> None:
    assert "1 step on cpu:0 … cpu:4\n" in str(explained(program_of(5), *[EVEN | DONE] * 5))


CALLS = (
    "start",
    "fwd_0",
    "bwd_0",
    "bwd_1",
    "pack b0",
    "reduce_scatter b1",
    "wait b0",
    "wait b1",
    "update b0",
    "update b1",
)


def check_printed_figures(found: Explanation) -> None:
    """What is printed adds up as it is printed: the parts of the step, each device's row, each bucket's exposed time."""
    summary, buckets, devices, *_ = str(found).split("\n\n")
    step = Decimal(re.match(r"A step takes ([\d.]+) ms", summary)[1])  # type: ignore[index]
    parts = re.findall(r"\w+ ([\d.]+) \(([\d.]+)%\)", summary)
    if found.step_ms > 0.0:
        assert sum(Decimal(share) for _, share in parts) == 100 and sum(Decimal(ms) for ms, _ in parts) == step
    for name, *row in map(str.split, devices.split("\n")[1:]):
        single = {"fastest": found.fastest_ms, "slowest": found.slowest_ms}.get(name)
        assert sum(map(Decimal, row)) == (printed(found, sum(single.values())) if single else step)
    sums = {name: Decimal(ms) for name, ms in re.findall(r"(skew|transfer) ([\d.]+) \(", summary)}
    wholes: list[tuple[Decimal, ...]] = []
    for line in buckets.split("\n")[1:]:
        if re.match(r" *b\d", line):
            cells = line[len(buckets.split("size")[0]) + 4 :].split()
            ready, launched, waited, finished, hidden, exposed, skew, transfer, *_ = cells
            assert Decimal(skew) + Decimal(transfer) == Decimal(exposed) and hidden != "0"
            assert Decimal(ready) <= Decimal(launched) <= Decimal(finished) <= step and Decimal(waited) <= Decimal(
                finished
            )
            if line.startswith("b"):
                wholes.append((Decimal(skew), Decimal(transfer)))
    if found.exposed_ms and found.meetings_ms == 0.0:
        assert [*map(sum, zip(*wholes, strict=True))] == [sums.get("skew", 0), sums.get("transfer", 0)]


def printed(found: Explanation, ms: float) -> Decimal:
    return Decimal(f"{ms:.{3 if found.step_ms < 10 else 2 if found.step_ms < 1000 else 1}f}")


@fuzzed(60)
@given(st.lists(st.floats(-1.0, 1e6), min_size=1, max_size=12), st.integers(0, 10**5))
def test_what_is_apportioned_adds_up(values: list[float], num_units: int) -> None:
    found = apportioned(values, num_units)
    positive = [max(0.0, value) for value in values]
    assert sum(found) == (num_units if sum(positive) else 0) and min(found) >= 0
    for value, units in zip(positive, found, strict=True):
        assert not sum(positive) or abs(units - value / sum(positive) * num_units) <= 1.0 + 1e-6


@pytest.mark.slow
@fuzzed(60)
@given(st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(["shared-memory", "nccl"]), st.integers(1, 3))
@example(1, 2676624, "shared-memory", 1)  # 9.1645 ms, which is printed as 9.165
def test_figures_always_add_up(num_devices: int, seed: int, link: str, num_steps: int) -> None:
    draw = random.Random(seed)
    program = _lowered(num_devices, link)
    steps = [
        recorded(
            program,
            *({name: draw.choice([0.0, draw.random() * 5]) for name in CALLS} for _ in range(num_devices)),
            warms_up=number == 0,
            begun_ms=100.0 * number,
        )
        for number in range(num_steps)
    ]
    found = explain_steps(program, steps)
    assert {bucket.index for bucket in found.buckets} == {0, 1}
    for times in (*found.buckets, *(own for bucket in found.buckets for own in bucket.devices)):
        assert times.exposed_ms == times.skew_ms + times.transfer_ms
        assert min(times.hidden_ms, times.skew_ms, times.transfer_ms) >= 0.0
        moments = (times.ready_ms, times.launched_ms, times.waited_ms, times.finished_ms)
        assert moments[0] >= 0.0 and list(moments) == sorted(moments) and moments[-1] <= found.step_ms + 1e-6
        assert times.exposed_ms == pytest.approx(times.finished_ms - times.waited_ms, abs=1e-6)
        assert link == "nccl" or times.hidden_ms == 0.0
    total = found.compute_ms + found.exposed_ms + found.update_ms + found.other_ms
    assert total == pytest.approx(found.step_ms) and min(found.parts_ms.values()) >= 0.0
    assert found.exposed_ms == pytest.approx(sum(bucket.exposed_ms for bucket in found.buckets))
    for device in found.devices:
        assert sum(device.parts_ms.values()) == pytest.approx(found.step_ms) and min(device.parts_ms.values()) >= 0.0
        waited_ms = sum(own.exposed_ms for b in found.buckets for own in b.devices if own.device == device.device)
        assert device.parts_ms["skew"] + device.parts_ms["transfer"] == pytest.approx(waited_ms)
    check_printed_figures(found)
    lines = str(found).split("\n")
    behind = tuple(bucket.behind for bucket in found.buckets if bucket.behind)
    assert max(len(line) for line in lines if not (behind and line.endswith(behind))) <= 110 and found.advice
    assert all(any(line.endswith(f"  {name}") for line in lines) for name in behind), "names are not cut"


_made: dict[tuple[int, str], Program] = {}


def _lowered(num_devices: int, link: str) -> Program:
    if (num_devices, link) not in _made:
        _made[num_devices, link] = program_of(num_devices, link=link)
    return _made[num_devices, link]


def test_the_text() -> None:
    late = EVEN | {"bwd_1": 9.0}
    text = str(explained(program_of(), EVEN | DONE, late | DONE))
    assert text == TEXT


TEXT = """\
A step takes 21.25 ms; 1 step on cpu:0, cpu:1
  start 1.00 (4.7%), forward 4.00 (18.8%), backward 8.00 (37.6%), pack 0.50 (2.4%), launch 0.25 (1.2%),
  skew 3.00 (14.1%), transfer 1.50 (7.1%), update 3.00 (14.1%)
  shared-memory moves nothing before the wait

bucket      size    ready launched   waited finished   hidden  exposed     skew transfer  behind
reduce_scatter over shared-memory, ms
b0       4.0 KiB     7.00     7.50    19.75    20.25        -     0.50     0.00     0.50  wait b1
b1     256.0 KiB    13.50    13.75    13.75    17.75        -     4.00     3.00     1.00  cpu:1's bwd_1
all                                                         -     4.50     3.00     1.50

device        start  forward backward     pack   launch     skew transfer   update
cpu:0          1.00     4.00     5.00     0.50     0.25     6.00     1.50     3.00
cpu:1          1.00     4.00    11.00     0.50     0.25     0.00     1.50     3.00

bucket: ready (its last gradient is made), launched, waited (its wait begins) and finished (its wait ends) are
  moments from the step's beginning, as means over the devices that take part; means over all devices (0 for
  one that does not wait) are hidden (in flight while the device does something else; - where nothing moves
  before the wait) and exposed (in the wait) = skew + transfer; behind is what it waited for longest: a call
  of a device that launched late, or an earlier wait
device: each row adds up to the step; parts that are 0 are left out. start: until the device's function
  begins; forward: in regions of forward; backward: in regions of backward; pack: filling buckets; launch:
  launching collectives; commit: in the commit, until the last device has come to it; skew: in waits, until
  the last device that is needed has launched; transfer: the rest of the waits: moving, adding up and
  multiplying factors; update: in the optimizer; write: writing buffers; other: in other calls; end: done,
  while another device is not

advice: even out the devices: cpu:1 computes for 15.000 ms, cpu:0 for 9.000 ms, 6.000 ms more in bwd_1: see
  what else runs on the cores of cpu:1. Estimated gain: 3.000 ms a step."""


@pytest.mark.slow
def test_text_of_many_devices_keeps_its_width() -> None:
    program = program_of(24)
    text = str(explained(program, *([EVEN | DONE] * 24)))
    assert max(len(line) for line in text.split("\n")) <= 110
