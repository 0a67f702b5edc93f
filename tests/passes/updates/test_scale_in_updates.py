"""The pass that lets updates scale gradients by themselves."""

import math
from typing import Any

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_up_to, targets

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of
from mirrorc.ir.program import Program
from mirrorc.passes import (
    CheckFinite,
    ClipGradients,
    LowerCollectives,
    LowerDevices,
    ScaleInUpdates,
    ShareParameters,
    UnscaleGradients,
)
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify

WEIGHTS = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (5, 5))]


def scaled(
    num_devices: int, *passes: Any, weights: Any = WEIGHTS, link: str | None = None, shares: bool = True
) -> Program:
    program = run_up_to("schedule-overlap", handmade(num_devices, weights, buffer=True), **SMALL_BUCKETS)
    sharing = [ShareParameters()] if shares else []
    return run_passes(program, [*sharing, *passes, LowerCollectives(link), ScaleInUpdates((0,))])


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_updates_take_the_factors(num_devices: int) -> None:
    for passes in (
        [ClipGradients(1.0)],
        [UnscaleGradients(), CheckFinite("skip")],
        [ClipGradients(1.0), UnscaleGradients()],
    ):
        program = scaled(num_devices, *passes)
        verify(program)
        graph = program.mirrored_graph
        assert not targets(graph, ops.scale)
        assert all(len(update.args) == 2 for update in targets(graph, ops.update))
        verify(run_passes(program, [LowerDevices()]))


def test_what_it_leaves_alone() -> None:
    whole = scaled(2, ClipGradients(1.0, max_value=0.5))
    assert len(targets(whole.mirrored_graph, ops.scale)) > 0, "the bound of elements comes after the factor"
    for program in (
        whole,
        scaled(2, ClipGradients(math.inf)),
        scaled(2, ClipGradients(1.0), link="shared-memory", shares=False),  # other replicas read the sum
        scaled(2, ClipGradients(1.0), weights=[Weight("a", (300,), dtype=torch.float64)]),
    ):
        assert all(len(update.args) == 1 for update in targets(program.mirrored_graph, ops.update))
        assert not [r for r in program.remarks if r.by == "scale-in-updates" and r.is_kept]
    mixed = scaled(2, ClipGradients(1.0), weights=[Weight("m", (300,), rule=MUON), Weight("b", (300,))])
    graph = mixed.mirrored_graph
    assert {bucket_of(update) for update in targets(graph, ops.update) if len(update.args) == 2} == {0}
    assert len(targets(graph, ops.scale)) == 1, "an optimizer that runs by itself takes what is scaled"
