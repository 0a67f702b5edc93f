from typing import Any

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade_of_worker, targets

from mirrorc import World
from mirrorc.analysis.communication.worker_meetings import schedule_hash
from mirrorc.compression import TopK
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.packing import EqualPacks
from mirrorc.passes import SendLargest, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify

WEIGHTS = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))]


def program_of(world: World, rank: int = 0, weights: list[Weight] = WEIGHTS, **options: Any) -> Program:
    given = {**({} if "buckets" in options else SMALL_BUCKETS), "compression": TopK(0.1), **options}
    return run_passes(
        handmade_of_worker(world, rank, weights), default_pipeline(over_workers=True, **given), [Verify()]
    )


def remarks(program: Program) -> list[str]:
    return [remark.text for remark in program.remarks if remark.by == "send-largest"]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_largest_elements_are_sent_with_what_was_not_sent_before(devices: int) -> None:
    program = program_of(World(2, devices))
    for graph in program.graphs():
        for launch in targets(graph, ops.gather_largest):
            (own,) = launch.all_input_nodes
            assert own.target is ops.add_unsent
            assert own.all_input_nodes[0].target is (ops.pack if devices == 1 else ops.wait)
            size = program.buckets[launch.kwargs["bucket"]].num_elements  # type: ignore[index]
            assert launch.kwargs["count"] == TopK(0.1).count(size)


@pytest.mark.parametrize(
    ("options", "taker"),
    [
        ({"check_finite": True}, ops.is_finite),
        ({"scales_loss": True}, ops.is_finite),
        ({"max_grad_norm": 1.0}, ops.norm),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_looks_at_sums_has_what_all_have_sent(options: dict[str, Any], taker: Any, devices: int) -> None:
    for graph in program_of(World(2, devices), **options).graphs():
        taken = [own for node in targets(graph, taker) for own in node.all_input_nodes if "bucket" in own.kwargs]
        assert taken and all(
            own.target is ops.wait and own.all_input_nodes[0].target in ops.EXCHANGES_OF_SUMS for own in taken
        )


def test_bytes_with_and_without_are_told_and_marked_in_the_dump() -> None:
    program = program_of(World(3))
    number = sum(len(targets(graph, ops.gather_largest)) for graph in program.graphs())
    assert (
        f"{number} exchange" in remarks(program)[0]
        and "which changes numbers: each of 3 workers" in remarks(program)[0]
    )
    assert str(program).count("of each of 3 workers: this changes numbers") == number


def test_many_workers_gather_more_than_whole_sums_are() -> None:
    """Each gets what each of 40 sends: a tenth of the elements, and as many places, are four sums."""
    assert not targets(program_of(World(40)).graphs()[0], ops.gather_largest)


def test_complex_numbers_are_sent_whole() -> None:
    program = program_of(World(2), weights=[Weight("a", (300,), dtype=torch.complex64), Weight("b", (300,))])
    (graph,) = program.graphs()
    assert len(targets(graph, ops.exchange)) == 1 == len(targets(graph, ops.gather_largest))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_packs_and_other_optimizers_are_sent_in_part(devices: int) -> None:
    cut = program_of(World(2, devices), buckets=EqualPacks(3))
    alone = program_of(World(2, devices), weights=[Weight("a", (30, 10), rule=MUON), Weight("b", (4, 10), rule=MUON)])
    assert all(len(targets(graph, ops.gather_largest)) == 3 for graph in cut.graphs())
    (taker,) = targets(alone.graphs()[0], ops.step_optimizer)
    assert all(own.all_input_nodes[0].target is ops.gather_largest for own in taker.all_input_nodes)


@pytest.mark.slow
def test_workers_that_send_other_parts_differ_in_what_they_exchange() -> None:
    hashes = {schedule_hash(program_of(World(2), compression=one)) for one in (TopK(0.1), TopK(0.2), None)}
    assert len(hashes) == 3


def test_another_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio is 2: give the part of all elements"):
        SendLargest(2)
