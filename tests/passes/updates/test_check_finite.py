"""The pass that lets a step take place only if losses and reduced gradients are finite."""

import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, outputs, run_up_to, targets

from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program, Property
from mirrorc.passes import CheckFinite, ShareParameters
from mirrorc.pipeline.pass_manager import run_passes

MIXED = [Weight("a", rule=MUON), Weight("b"), Weight("c", (5, 5))]


def scheduled(num_devices: int, shares: bool = True) -> Program:
    program = run_up_to("schedule-overlap", handmade(num_devices, MIXED, buffer=True), **SMALL_BUCKETS)
    return run_passes(program, [ShareParameters()]) if shares else program


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("shares", [True, False])
def test_each_commit_is_told_of_all_that_updates_take_and_of_the_loss(num_devices: int, shares: bool) -> None:
    before = scheduled(num_devices, shares)
    program = run_passes(before, [CheckFinite("skip")])
    graph = program.mirrored_graph
    for commit in targets(graph, ops.commit):
        replica = replica_of(commit)
        takers = [n for n in targets(graph, ops.update, ops.step_optimizer) if replica_of(n) == replica]
        taken = {given for node in takers for given in node.all_input_nodes}
        looked_at = [flag.args[0] for flag in commit.args]
        assert set(looked_at) == taken | {outputs(graph)["losses"][replica]} and len(looked_at) == len(set(looked_at))
        assert all(flag < commit and replica_of(flag) == replica for flag in commit.args)
        assert commit.kwargs["otherwise"] == "skip"
    assert Property.CHECKED in program.properties


def test_it_runs_once_and_after_the_placement() -> None:
    checked = run_passes(scheduled(2), [CheckFinite()])
    with pytest.raises(PassError, match="'check-finite' takes programs that are not checked yet"):
        run_passes(checked, [CheckFinite()])
    with pytest.raises(PassError, match="was given a program that is checked already"):
        CheckFinite().run(checked)
