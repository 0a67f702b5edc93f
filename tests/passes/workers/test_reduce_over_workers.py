from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import MUON, SMALL_BUCKETS, Weight, every_stage, handmade_of_worker, targets

from mirrorc import World
from mirrorc.analysis.communication.worker_meetings import schedule_hash, worker_schedule
from mirrorc.errors import PassError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program, Property
from mirrorc.packing import ByBytes
from mirrorc.passes import LowerDevices, ReduceOverWorkers, default_pipeline
from mirrorc.passes.workers.reduce_over_workers import _update_early
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify, verify

LARGE = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))]


def before(world: World, rank: int, weights: list[Weight] = LARGE) -> Program:
    return every_stage_before(handmade_of_worker(world, rank, weights))


def every_stage_before(program: Program, **options: float) -> Program:
    pipeline = default_pipeline(over_workers=True, **{**SMALL_BUCKETS, **options})  # type: ignore[arg-type]
    names = [one.name for one in pipeline]
    return run_passes(program, pipeline[: names.index("reduce-over-workers")])


def buckets(nodes: list[torch.fx.Node]) -> list[int]:
    return [bucket_of(node) for node in nodes]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_bucket_is_exchanged_in_the_order_of_the_plan_and_updated_from_the_sum(rank: int) -> None:
    program = ReduceOverWorkers().run(before(World(2, (1, 2)), rank))
    verify(program)
    graph = program.mirrored_graph
    assert buckets(targets(graph, ops.exchange)) == [0, 1, 2]
    for launch in targets(graph, ops.exchange):
        assert [replica_of(node) for node in launch.all_input_nodes] == list(range(program.num_replicas))
    for update in targets(graph, ops.update):
        (total,) = update.all_input_nodes
        assert total.target is ops.wait and total.args[0].target is ops.exchange  # type: ignore[union-attr]
        assert min(targets(graph, ops.commit)) < total < update


@pytest.mark.parametrize("devices", [1, 2])
def test_a_bucket_is_updated_when_its_own_sum_is_there(devices: int) -> None:
    program = ReduceOverWorkers().run(before(World(2, devices), 1))
    verify(program)
    graph = program.mirrored_graph
    assert all(commit.kwargs["early"] for commit in targets(graph, ops.commit))
    waits = [node for node in targets(graph, ops.wait) if node.args[0].target is ops.exchange]  # type: ignore[union-attr]
    last = max(targets(graph, ops.commit))
    assert max(targets(graph, ops.exchange)) < last < min(waits)
    assert buckets(sorted([*waits, *targets(graph, ops.update)])) == sorted(
        buckets([*waits, *targets(graph, ops.update)])
    )
    assert "while others are in flight: if a connection is lost then" in program.remarks[-1].text


@pytest.mark.parametrize(
    ("compiler_pass", "why"),
    [
        (ReduceOverWorkers(early_update=False), "another worker may be gone (early_update=False)"),
        (ReduceOverWorkers(needs_all_sums="clip_grad_norm"), "clip_grad_norm needs them"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_all_sums_are_waited_for_before_the_commit(compiler_pass: ReduceOverWorkers, why: str, devices: int) -> None:
    program = compiler_pass.run(before(World(2, devices), 1))
    verify(program)
    graph = program.mirrored_graph
    assert not any("early" in commit.kwargs for commit in targets(graph, ops.commit))
    assert max(targets(graph, ops.wait)) < min(targets(graph, ops.commit)) < min(targets(graph, ops.update))
    assert program.remarks[-1].text.endswith(f"all sums are waited for before the commit, because {why}")


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"scales_loss": True}, {"check_finite": True}])
def test_what_looks_at_all_sums_has_them_before_the_commit(options: dict[str, Any]) -> None:
    program = every_stage(handmade_of_worker(World(2, 2), 0, LARGE), over_workers=True, **SMALL_BUCKETS, **options)[
        "lower-devices"
    ]
    verify(program)
    for graph in program.graphs():
        assert max(targets(graph, ops.wait)) < targets(graph, ops.commit)[0] < min(targets(graph, ops.update))


def test_a_bound_of_each_element_needs_no_other_sum() -> None:
    program = every_stage(
        handmade_of_worker(World(2), 0, LARGE), over_workers=True, **SMALL_BUCKETS, max_grad_value=1.0
    )["lower-devices"]
    graph = program.graphs()[0]
    assert max(targets(graph, ops.commit)) < min(targets(graph, ops.wait))


def test_what_takes_several_sums_comes_behind_the_last() -> None:
    program = before(World(2), 0)
    updates = targets(program.mirrored_graph, ops.update)
    plain = ReduceOverWorkers(early_update=False).run(program)
    graph = plain.mirrored_graph
    sums = targets(graph, ops.wait)
    assert len(sums) == len(updates) == 3
    first, last = targets(graph, ops.update)[0], sums[-1]
    mixed = insert(
        plain, first, torch.ops.aten.add.Tensor, (sums[0], insert(plain, first, torch.ops.aten.sum.default, (last,)))
    )
    first.replace_input_with(sums[0], mixed)
    assert _update_early(graph)
    graph.lint()
    assert max(targets(graph, ops.wait)) < first


def test_a_commit_that_takes_a_sum_stays_behind_all() -> None:
    graph = ReduceOverWorkers(early_update=False).run(before(World(2), 0)).mirrored_graph
    (commit,) = targets(graph, ops.commit)
    commit.args = (targets(graph, ops.wait)[0],)
    order = list(graph.nodes)
    assert not _update_early(graph)
    assert list(graph.nodes) == order and "early" not in commit.kwargs


def test_devices_add_up_first_and_wait_when_the_next_bucket_is_launched() -> None:
    program = ReduceOverWorkers().run(before(World(2, 2), 1))
    nodes = targets(program.mirrored_graph, ops.reduce_scatter, ops.exchange)
    order = [(node.target.__name__, bucket_of(node)) for node in nodes]  # type: ignore[union-attr]
    names = "reduce_scatter", "exchange"
    assert order == [(names[0], 0), (names[0], 1), (names[1], 0), (names[0], 2), (names[1], 1), (names[1], 2)]


def test_what_a_worker_sends_does_not_depend_on_its_devices() -> None:
    remarks = {ReduceOverWorkers().run(before(World(4, (1, 2, 1, 3)), rank)).remarks[-2].text for rank in (1, 3)}
    assert remarks == {
        "3 exchanges, one per bucket, which its devices have added up first: 2.4 KiB, of which each of 4 workers sends 3.7 KiB "
        "in a step (in a ring, with as much received), however many devices it has"
    }


@pytest.mark.parametrize("world", [World(2), World(2, 2), World(2, 4)])
def test_an_optimizer_that_runs_by_itself_gets_sums_over_all_workers(world: World) -> None:
    weights = [Weight("a", (4,), rule=MUON), Weight("b", (4,))]
    program = ReduceOverWorkers().run(before(world, 0, weights))
    verify(program)
    (step,) = targets(program.mirrored_graph, ops.step_optimizer)
    (total,) = step.all_input_nodes
    assert total.target is ops.wait and total.all_input_nodes[0].target is ops.exchange
    for launch in targets(program.mirrored_graph, ops.exchange):
        assert [replica_of(node) for node in launch.all_input_nodes] == list(range(program.num_replicas))
    assert "bucket 1: every worker runs Muon group 0 by itself" in program.remarks[-2].text


def test_devices_without_shares_are_refused() -> None:
    pipeline = [one for one in default_pipeline(over_workers=True) if one.name != "share-parameters"]
    with pytest.raises(
        PassError,
        match=r"the 2 devices of this worker each sum all of bucket \d\n  why:  the worker would send it once for each",
    ):
        run_passes(handmade_of_worker(World(2, 2), 0, LARGE), pipeline)


def test_what_is_computed_of_a_sum_is_computed_of_the_sum_over_workers() -> None:
    program = before(World(2, 2), 0)
    for wait in targets(program.mirrored_graph, ops.wait):
        neg = insert(program, wait.next, torch.ops.aten.neg.default, (wait,))
        for user in [user for user in wait.users if user is not neg]:
            user.replace_input_with(wait, neg)
    after = ReduceOverWorkers().run(program)
    verify(after)
    for neg in targets(after.mirrored_graph, torch.ops.aten.neg.default):
        assert neg.all_input_nodes[0].args[0].target is ops.exchange  # type: ignore[union-attr]


def test_what_is_computed_of_the_only_devices_bucket_is_refused() -> None:
    program = before(World(2), 0)
    pack = targets(program.mirrored_graph, ops.pack)[0]
    neg = insert(program, pack.next, torch.ops.aten.neg.default, (pack,))
    for user in [user for user in pack.users if user is not neg]:
        user.replace_input_with(pack, neg)
    with pytest.raises(PassError, match="computed of bucket 0 before it is exchanged\n  why:  it is not said whether"):
        ReduceOverWorkers().run(program)


def test_a_program_of_several_workers_needs_the_pass() -> None:
    program = before(World(2), 0)
    with pytest.raises(VerifyError, match="exchanges bucket 0 0 times, not 1; run 'reduce-over-workers'"):
        verify(LowerDevices().run(program))


@pytest.mark.slow
@fuzzed(8)
@given(
    per_worker=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    halves=st.sets(st.integers(0, 5)),
    cap=st.integers(1, 4000),
    first=st.integers(1, 4000),
)
def test_all_workers_of_a_world_have_one_schedule(
    per_worker: list[int], sizes: list[int], halves: set[int], cap: int, first: int
) -> None:
    """Whatever their devices, and whatever the bucket plan: the schedule is that of the plan, bucket by bucket."""
    dtypes = [torch.float16 if place in halves else torch.float32 for place in range(len(sizes))]
    weights = [Weight(f"w{i}", (n,), dtype) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    world = World(len(per_worker), per_worker)
    schedules = set()
    for rank in range(len(per_worker)):
        options = {"buckets": ByBytes(cap / 2**20, first / 2**20)}
        pipeline = default_pipeline(over_workers=True, **options)  # type: ignore[arg-type]
        program = run_passes(handmade_of_worker(world, rank, weights), pipeline, [Verify()])
        assert Property.EXCHANGED in program.properties
        schedules.add((worker_schedule(program), schedule_hash(program)))
        assert len(worker_schedule(program)) == 1 + len(program.buckets)
    assert len(schedules) == 1


@pytest.mark.slow
def test_another_plan_and_another_world_are_another_schedule() -> None:
    def hash_of(world: World, weights: list[Weight] = LARGE, **options: float) -> str:
        given = {**SMALL_BUCKETS, **options}
        return schedule_hash(
            every_stage(handmade_of_worker(world, 0, weights), over_workers=True, **given)["lower-devices"]
        )

    hashes = [
        hash_of(World(2)),
        hash_of(World(3)),
        hash_of(World(2, (1, 2))),
        hash_of(World(2), buckets=25.0),
        hash_of(World(2), LARGE[::-1]),
        hash_of(World(2), [LARGE[0], LARGE[1], Weight("other", (2,))]),
    ]
    assert len(set(hashes)) == len(hashes)
