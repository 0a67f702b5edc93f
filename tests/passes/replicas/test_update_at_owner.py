import re

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, core_pipeline, every_stage, handmade, run_up_to, targets

from mirrorc.comparison.diff import diff_programs
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.ir.workers import World
from mirrorc.passes import PlaceVariables, ShareParameters, UpdateAtOwner
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify

WEIGHTS = [Weight("a", (300,)), Weight("b", (200,)), Weight("c", (100,))]


def scheduled(num_devices: int = 2, weights: list[Weight] = WEIGHTS, rule: str = "least-loaded") -> Program:
    placed = PlaceVariables(rule).run(run_up_to("plan-buckets", handmade(num_devices, weights), **SMALL_BUCKETS))
    pipeline = core_pipeline(**SMALL_BUCKETS)
    names = [one.name for one in pipeline]
    return run_passes(placed, pipeline[names.index("plan-buckets") + 1 : names.index("lower-collectives")])


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("rule", ["central", "least-loaded", "cpu:1"])
def test_the_owner_alone_updates_and_all_others_write_a_copy(num_devices: int, rule: str) -> None:
    before = scheduled(num_devices, rule=rule)
    program = UpdateAtOwner().run(before)
    verify(program)
    graph = program.mirrored_graph
    assert program.stage is Stage.SCHEDULED and not targets(graph, ops.all_reduce)
    for bucket in program.buckets:
        own = {
            target: [n for n in targets(graph, target) if bucket_of(n) == bucket.index]
            for target in (ops.reduce, ops.update, ops.updated, ops.broadcast, ops.store)
        }
        assert bucket.owner is not None and bucket.has_owner
        assert [node.kwargs["root"] for node in own[ops.reduce] + own[ops.broadcast]] == [bucket.owner] * 2
        assert [replica_of(node) for node in own[ops.update] + own[ops.updated]] == [bucket.owner] * 2
        assert [replica_of(node) for node in own[ops.store]] == [r for r in range(num_devices) if r != bucket.owner]
        waits = [n for n in own[ops.reduce][0].users if n.target is ops.wait]
        assert [n.meta["val"].numel() for n in waits] == [
            bucket.num_elements * (replica == bucket.owner) for replica in range(num_devices)
        ]
    stores = targets(graph, ops.store)
    assert all(
        update < stores[0] for update in targets(graph, ops.update)
    )  # nobody waits for others before its own updates


def test_what_is_computed_of_a_sum_stays_where_the_sum_is() -> None:
    program = scheduled()
    for wait in targets(program.mirrored_graph, ops.wait):
        cast = insert(program, wait.next, torch.ops.aten.mul.Tensor, (wait, 2.0))
        wait.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
    after = UpdateAtOwner().run(program)
    verify(after)
    made = targets(after.mirrored_graph, torch.ops.aten.mul.Tensor)
    assert len([node for node in made if node.args[1] == 2.0]) == 3


def test_an_optimizer_that_runs_by_itself_gets_its_sums_alone() -> None:
    weights = [Weight("a", (300,), rule=MUON), Weight("b", (200,)), Weight("c", (200,))]
    program = UpdateAtOwner().run(scheduled(2, weights))
    verify(program)
    graph = program.mirrored_graph
    (step,) = targets(graph, ops.step_optimizer)
    assert [source.args[0].target for source in step.all_input_nodes] == [ops.reduce]  # type: ignore[union-attr]
    assert len(targets(graph, ops.store)) == 3 and len(targets(graph, ops.update)) == 2


def test_sends_take_the_place_of_broadcasts_and_programs_are_read_back() -> None:
    stages = every_stage(handmade(3, WEIGHTS), placement="central", link="copy")
    program = stages["lower-devices"]
    verify(program)
    sent = [len(targets(graph, ops.send)) for graph in program.graphs()]
    received = [len(targets(graph, ops.recv)) for graph in program.graphs()]
    stored = [len(targets(graph, ops.store)) for graph in program.graphs()]
    assert (sent, received, stored) == ([2, 0, 0], [0, 1, 1], [0, 1, 1])
    text = program.to_text(fold=False)
    assert "owned by cpu:0" in text and "reduce(bucket=0, b0, op=sum, root=0, link=copy)" in text
    assert "send(bucket=0, updated(b0), destination=1, link=copy)" in text


def test_a_difference_of_owners_is_said() -> None:
    one, other, shared = (
        every_stage(handmade(2, WEIGHTS), **options)["lower-devices"]
        for options in ({"placement": "central"}, {"placement": "cpu:1"}, {})
    )
    assert re.search(r"(?m)^-# bucket 0 .*owned by cpu:0[^@]*^\+# bucket 0 .*owned by cpu:1", diff_programs(one, other))
    assert re.search(r"(?m)^-# bucket 0 .*shared[^@]*^\+# bucket 0 .*owned by cpu:0", diff_programs(shared, one))


def test_a_program_that_accumulates_has_the_same_buckets_and_no_update() -> None:
    ending = UpdateAtOwner().run(scheduled())
    captured = handmade(2, WEIGHTS).evolve(accumulation=Accumulation.ADDS)
    program = every_stage(captured, placement="least-loaded", **SMALL_BUCKETS)["lower-devices"]
    verify(program)
    assert program.buckets == ending.buckets
    assert not any(targets(graph, ops.reduce, ops.update, ops.send) for graph in program.graphs())


def test_one_device_has_nothing_to_leave() -> None:
    program = every_stage(handmade(1, WEIGHTS), placement="central")["lower-devices"]
    verify(program)
    assert not any(targets(graph, ops.reduce, ops.store, ops.send) for graph in program.graphs())


@pytest.mark.slow
def test_it_refuses_what_it_cannot_leave_to_owners() -> None:
    program = scheduled()
    with pytest.raises(PassError, match="this step has 2 workers"):
        UpdateAtOwner().run(program.evolve(workers=World(2, 2).worker(0)))
    shared = run_up_to("schedule-overlap", handmade(2, WEIGHTS))
    with pytest.raises(PassError, match="takes programs that are not placed yet\n  why:  this one is already"):
        run_passes(shared, [ShareParameters(), UpdateAtOwner()])
