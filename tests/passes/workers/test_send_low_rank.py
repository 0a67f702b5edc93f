from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, Weight, every_stage, handmade, targets

from mirrorc import World
from mirrorc.analysis.communication.compressed_sums import bytes_of_rounds, num_bytes_sent
from mirrorc.analysis.communication.worker_schedule import schedule_hash
from mirrorc.errors import PassError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.packing import EqualPacks
from mirrorc.passes import SendLowRank, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.power_sgd import PowerSGD
from mirrorc.verifier.verifier import Verify, verify

WEIGHTS = [Weight("a", (30, 40)), Weight("b", (40,)), Weight("c", (3, 4)), Weight("d", (20, 3, 5))]


def program_of(world: World, rank: int = 0, weights: list[Weight] = WEIGHTS, **options: Any) -> Program:
    workers = world.worker(rank)
    captured = handmade(workers.devices_per_worker[rank], weights).evolve(workers=workers)
    given = {"compression": PowerSGD(2), **options}
    return run_passes(captured, default_pipeline(over_workers=True, **given), [Verify()])


def remarks(program: Program) -> str:
    return " ".join(remark.text for remark in program.remarks if remark.by == "send-low-rank")


@pytest.mark.parametrize("devices", [1, 2])
def test_matrices_are_sent_as_factors_with_what_was_not_sent_before(devices: int) -> None:
    program = program_of(World(2, devices))
    for graph in program.graphs():
        (launch,) = targets(graph, ops.exchange_low_rank)
        assert set(launch.kwargs["matrices"]) == {"a", "d"}  # type: ignore[arg-type]
        (own,) = launch.all_input_nodes
        assert own.target is ops.add_unsent
        assert own.all_input_nodes[0].target is (ops.pack if devices == 1 else ops.wait)


def test_the_choice_for_each_gradient_is_told_with_the_bytes() -> None:
    program = program_of(World(3))
    text = remarks(program)
    assert "1 exchange of rank 2, which changes numbers: each of 3 workers sends" in text
    assert "a (30 x 40, 140 of 1200 elements)" in text and "d (20 x 15, 70 of 300 elements)" in text
    assert "b (no matrix in one pack)" in text and "c (its factors are too long)" in text
    (launch,) = targets(program.graphs()[0], ops.exchange_low_rank)
    left, right = bytes_of_rounds(program, launch)
    gaps = program.buckets[0].num_elements - 1200 - 40 - 12 - 300
    assert (left, right) == ((2 * (30 + 20) + 40 + 12 + gaps) * 4, 2 * (40 + 15) * 4)
    assert num_bytes_sent(program, launch) == left + right
    assert "in place of 6." in str(program) and "summed over 3 workers: this changes numbers" in str(program)


def test_other_rates_and_ranks_are_other_choices() -> None:
    chosen = {}
    for option in (PowerSGD(1), PowerSGD(8), PowerSGD(8, min_compression_rate=1), PowerSGD(2, 9.0)):
        launches = targets(program_of(World(2), compression=option).graphs()[0], ops.exchange_low_rank)
        chosen[option] = {name for launch in launches for name in launch.kwargs["matrices"]}  # type: ignore[union-attr]
    assert list(chosen.values()) == [{"a", "d"}, {"a"}, {"a", "d"}, set()]


def test_a_bucket_without_such_a_matrix_is_sent_as_it_is() -> None:
    program = program_of(World(2), weights=WEIGHTS[:3], **SMALL_BUCKETS)
    (graph,) = program.graphs()
    assert len(targets(graph, ops.exchange_low_rank)) == 1 and len(targets(graph, ops.exchange)) == 2
    assert "buckets 0 and 1 not of rank 2: no matrix in it is large enough" in remarks(program)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_sent_as_they_are(dtype: torch.dtype) -> None:
    program = program_of(World(2), weights=[Weight("a", (30, 40), dtype=dtype)])
    assert not targets(program.graphs()[0], ops.exchange_low_rank)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_matrix_in_two_packs_is_sent_whole_beside_others(devices: int) -> None:
    program = program_of(World(2, devices), weights=[*WEIGHTS, Weight("e", (60, 10))], packing=EqualPacks(3))
    for graph in program.graphs():
        sent = [node.kwargs["matrices"] for node in targets(graph, ops.exchange_low_rank)]
        assert len(sent) + len(targets(graph, ops.exchange)) == 3 and sent
        assert "a" not in {name for names in sent for name in names}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "taker"),
    [
        ({"check_finite": True}, ops.is_finite),
        ({"scales_loss": True}, ops.is_finite),
        ({"max_grad_norm": 1.0}, ops.norm),
    ],
)
def test_what_looks_at_sums_has_what_all_have_sent(options: dict[str, Any], taker: Any) -> None:
    for graph in program_of(World(2, 2), **options).graphs():
        taken = [own for node in targets(graph, taker) for own in node.all_input_nodes if "bucket" in own.kwargs]
        assert taken and all(own.all_input_nodes[0].target is ops.exchange_low_rank for own in taken)


def test_the_library_multiplies_where_it_does_so_alike_on_all_workers() -> None:
    workers = World(2).worker(0)
    hashes = set()
    for are_alike in (False, True):
        captured = handmade(1, WEIGHTS).evolve(workers=replace(workers, multiply_alike=are_alike))
        program = run_passes(captured, default_pipeline(over_workers=True, compression=PowerSGD(2)), [Verify()])
        (launch,) = targets(program.graphs()[0], ops.exchange_low_rank)
        assert launch.kwargs["by_library"] is are_alike
        hashes.add(schedule_hash(program))
    assert len(hashes) == 2


def test_workers_that_ask_for_other_factors_differ_in_what_they_exchange() -> None:
    asked = [PowerSGD(2), PowerSGD(3), PowerSGD(2, seed=1), PowerSGD(2, start_step=1), PowerSGD(2, 5.0), None]
    assert len({schedule_hash(program_of(World(2), compression=one)) for one in asked}) == len(asked)


def test_one_worker_sends_nothing() -> None:
    program = run_passes(handmade(2, WEIGHTS), default_pipeline(compression=PowerSGD(2)))
    assert not any(targets(graph, ops.exchange_low_rank) for graph in program.graphs())
    assert remarks(program) == "nothing is compressed: there is one worker, and nothing is sent to others"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"rank": 0}, "its keyword rank is 0, but factors have one column or more"),
        ({"rank": 20}, "20 columns of factors are not shorter than"),
        ({"matrices": ("b",)}, "its keyword matrices is ('b',), but it sends factors of some of: "),
        ({"matrices": ("a", "d")}, "its keyword matrices is ('a', 'd'), but"),  # the other order
        ({"matrices": ()}, "its keyword matrices is (), but"),
        ({"seed": -1}, "its keyword seed is -1, no whole number"),
        ({"by_library": None}, "its keyword by_library is None, neither True nor False"),
        ({"start_step": None}, "its keyword start_step is None, no whole number"),
    ],
)
def test_other_keywords_are_refused(words: dict[str, Any], why: str) -> None:
    program = program_of(World(2))
    (launch,) = targets(program.graphs()[0], ops.exchange_low_rank)
    launch.kwargs = {**launch.kwargs, **words}
    with pytest.raises(VerifyError) as error:
        verify(program)
    assert why in str(error.value)


def test_it_needs_exchanges() -> None:
    captured = handmade(1, WEIGHTS).evolve(workers=World(2).worker(0))
    before = every_stage(captured, over_workers=True)["share-parameters"]
    with pytest.raises(PassError, match="'reduce-over-workers' must come before it"):
        SendLowRank().run(before)
