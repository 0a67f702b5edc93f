"""The pass that scales gradients so that their norm is bounded, and bounds their elements."""

import math

import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_up_to, targets

from mirrorc.analysis.buckets.rescaling import numbers_of, taken_by
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program, Property
from mirrorc.ir.variables import UpdateRule
from mirrorc.passes import CheckFinite, ClipGradients, ShareParameters
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify

MIXED = [Weight("a", (300,), rule=MUON), Weight("b", (300,)), Weight("c", (5, 5))]
GROUPS = [Weight(name, (200,), rule=UpdateRule(f"AdamW group {i % 2}", i % 2)) for i, name in enumerate("abcd")]


def scheduled(num_devices: int, weights: list[Weight], shares: bool = True) -> Program:
    program = run_up_to("schedule-overlap", handmade(num_devices, weights, buffer=True), **SMALL_BUCKETS)
    return run_passes(program, [ShareParameters()]) if shares else program


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("shares", [True, False])
def test_each_update_takes_what_is_scaled_by_one_norm(num_devices: int, shares: bool) -> None:
    program = run_passes(scheduled(num_devices, MIXED, shares), [ClipGradients(1.0, 3.0, max_value=0.5)])
    verify(program)
    graph = program.mirrored_graph
    for taker in targets(graph, ops.update, ops.step_optimizer):
        for _, value in taken_by(taker):
            scaled = value.args[0]
            assert [value.target, scaled.target] == [ops.clip_value, ops.scale]
            assert scaled.args[1].kwargs["max_norm"] == 1.0 and value.kwargs["max_value"] == 0.5
    are_exchanged = shares and num_devices > 1
    assert [len(numbers_of(commit)) for commit in targets(graph, ops.commit)] == [int(are_exchanged)] * num_devices
    assert Property.CLIPPED in program.properties


def test_only_sums_whose_norm_is_needed_move_before_the_commit() -> None:
    graph = run_passes(scheduled(2, GROUPS), [ClipGradients((None, 1.0))]).mirrored_graph
    commit = targets(graph, ops.commit)[0]
    sides = {(bucket_of(wait), wait < commit) for wait in targets(graph, ops.wait)}
    groups = dict(sides)
    assert len(sides) == len(groups) == 4 and sorted(groups.values()) == [False, False, True, True]
    untouched = [taker for taker in targets(graph, ops.update) if taker.args[0].target is ops.wait]
    assert {groups[bucket_of(taker)] for taker in untouched} == {False}


def test_groups_are_measured_apart() -> None:
    program = run_passes(scheduled(2, GROUPS), [ClipGradients((1.0, math.inf), (2.0, 1.0)), CheckFinite()])
    verify(program)
    graph = program.mirrored_graph
    assert [[n.kwargs["norm_type"] for n in numbers_of(commit)] for commit in targets(graph, ops.commit)] == [
        [2.0, 1.0]
    ] * 2
    told = [(node.kwargs["what"], replica_of(node)) for node in targets(graph, ops.tell)]
    assert sorted(told) == [(f"grad_norm_{group}", replica) for group in (0, 1) for replica in (0, 1)]
    assert len(targets(graph, ops.clip_factor)) == 2, "an infinite bound is only measured"


def test_it_says_what_it_did() -> None:
    for weights, options, said in (
        (MIXED, (1.0,), "all gradients (3 buckets) are scaled so that their 2-norm is at most 1: each device takes the norm "
         "of its shares, and all exchange the norms at the commit"),
        (MIXED, (math.inf, math.inf), "the largest element of all gradients (3 buckets) is only measured: each device takes the "
         "norm of its shares, and all exchange the norms at the commit"),
        (MIXED, (None, 2.0, 0.25), "each element of a gradient is brought to between -0.25 and 0.25"),
    ):  # fmt: skip
        program = run_passes(scheduled(2, weights), [ClipGradients(*options)])
        assert [remark.text for remark in program.remarks if remark.by == "clip-gradients"] == [said]


@pytest.mark.slow
def test_what_it_refuses() -> None:
    with pytest.raises(PassError, match="'clip-gradients' takes programs that are not clipped yet"):
        run_passes(scheduled(2, GROUPS), [ClipGradients(1.0), ClipGradients(1.0)])
    with pytest.raises(PassError, match="'clip-gradients' takes programs that are not checked yet"):
        run_passes(scheduled(2, GROUPS), [CheckFinite(), ClipGradients(1.0)])
    for wrong in ((-1.0,), (math.nan,), (1.0, 0.0), (1.0, math.nan), (None, 2.0, -1.0), (None, 2.0, math.nan)):
        with pytest.raises(ValueError, match="give a"):
            ClipGradients(*wrong)
