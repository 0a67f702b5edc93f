"""What is advised, exactly, on handmade records."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from handmade_steps import DONE, EVEN, MEBIBYTE, SIZED, TWO, called, explained, program_of, recorded
from tiny_programs import MUON, Weight

from mirrorc.ir import ops
from mirrorc.ir.links import Link, register_link, unregister_link
from mirrorc.ir.nodes import call_name, is_region_call
from mirrorc.packing import ByBytes
from mirrorc.runtime.profiling.explain_steps import advise, explain_steps


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
        ((2, 2, 3), "as many examples, by a batch of 6 or 9 or another multiple of 3"),
        ((0, 1, 1), "as many examples, by a batch of 3 or another multiple of 3"),
        ((2, 2, 2), "examples of the same length"),
    ],
)
def test_the_advice_on_uneven_shards_names_batch_sizes_that_are_even(sizes: tuple[int, ...], advised: str) -> None:
    program = program_of(3, uneven=True).evolve(num_examples=sizes)
    found = explained(program, EVEN | DONE, EVEN | DONE, EVEN | DONE | {"fwd_0.shard1": 9.0})
    assert f": give every device {advised}. Estimated gain: 3.333 ms" in found.advice


def test_a_device_that_is_late_with_fewer_examples_is_not_late_by_its_shard() -> None:
    program = program_of(3, uneven=True).evolve(num_examples=(3, 3, 2))
    found = explained(program, EVEN | DONE, EVEN | DONE, EVEN | DONE | {"fwd_0.shard1": 9.0})
    assert "though it has 2 examples and another 3: see what else runs on the cores of cpu:2" in found.advice


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
