import dataclasses

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import MUON, SMALL_BUCKETS, Weight, captured_model, handmade, handmade_of_worker, targets
from torch import nn

from mirrorc import World
from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts
from mirrorc.analysis.buckets.rescaling import Norms
from mirrorc.analysis.communication.worker_meetings import schedule_hash, worker_schedule
from mirrorc.errors import PassError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Elements
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Accumulation, Program
from mirrorc.packing import ByBytes
from mirrorc.passes import ClipGradients, ReduceOverWorkers, ShardOptimizer, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import for_accumulation
from mirrorc.verifier.verifier import Verify, verify

LARGE = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))]


def captured(world: World, rank: int, weights: list[Weight] = LARGE, *, is_sharded: bool = True) -> Program:
    return handmade_of_worker(world, rank, weights, is_sharded=is_sharded)


def run_until(program: Program, last: str, **options: float) -> Program:
    pipeline = default_pipeline(over_workers=True, shard_optimizer=True, **{**SMALL_BUCKETS, **options})  # type: ignore[arg-type]
    names = [one.name for one in pipeline]
    return run_passes(program, pipeline[: names.index(last) + 1], [Verify()])


def order_of(graph: torch.fx.Graph) -> list[tuple[str, int]]:
    nodes = targets(graph, ops.scatter_sums, ops.commit, ops.update, ops.gather_parameters)
    return [(node.target.__name__, int(node.kwargs.get("bucket", -1))) for node in nodes]  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("is_early", [True, False])
def test_each_worker_updates_its_part_and_all_gather_it_in_the_order_of_the_next_forward(is_early: bool) -> None:
    program = run_until(captured(World(2), 1), "shard-optimizer", early_update=is_early)
    graph = program.mirrored_graph
    late = [(name, bucket) for bucket in (2, 1, 0) for name in ("update", "gather_parameters")]
    early = [(name, bucket) for name in ("update", "gather_parameters") for bucket in (0, 1, 2)]
    assert order_of(graph) == [
        *(("scatter_sums", bucket) for bucket in (0, 1, 2)),
        ("commit", -1),
        *([*early[:3], *early[:2:-1]] if is_early else late),
    ]
    assert not targets(graph, ops.exchange)
    for bucket in program.buckets:
        half = bucket.num_elements // 2
        assert bucket.num_elements % 128 == 0
        assert bucket.part == Elements(half, 2 * half)
    for update in targets(graph, ops.update):
        (part,) = update.all_input_nodes
        assert part.args[0].target is ops.scatter_sums  # type: ignore[union-attr]
        assert part.meta["val"].shape == (program.buckets[bucket_of(update)].num_elements // 2,)
    waits = [node for node in targets(graph, ops.wait) if node.args[0].target is ops.gather_parameters]  # type: ignore[union-attr]
    assert [bucket_of(node) for node in waits] == [2, 1, 0]
    assert min(waits) > max(targets(graph, ops.gather_parameters))


def test_a_workers_devices_share_its_part() -> None:
    """The second worker's first device has no element of the small buckets' parts, and waits for them all the same."""
    program = run_until(captured(World(3, (1, 2, 1)), 1), "shard-optimizer")
    for bucket in program.buckets:
        assert bucket.part is not None
        shares = [bucket.updated(replica, 2) for replica in (0, 1)]
        assert (shares[0][0], shares[0][1], shares[1][1]) == (bucket.part.start, shares[1][0], bucket.part.stop)
    for launch in targets(program.mirrored_graph, ops.scatter_sums):
        assert [replica_of(node) for node in launch.users] == [0, 1]
    updating = [
        [replica_of(n) for n in targets(program.mirrored_graph, ops.update) if bucket_of(n) == b] for b in range(3)
    ]
    assert updating == [[1], [0, 1], [0, 1]]


def test_it_says_what_is_sent() -> None:
    program = run_until(captured(World(2), 0), "shard-optimizer")
    assert program.remarks[-1].text == (
        "each of 2 workers updates its part of 3 buckets, with the optimizer's state of that part alone, and sends 1.8 KiB of "
        "sums and 1.8 KiB of new parameters in a step, however many devices it has; these are gathered in the order in which "
        "forward uses them, the reverse of the plan"
    )


def sending(rank: int, devices: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 100, bias=False), nn.Tanh(), nn.Linear(100, 3))
    workers = dataclasses.replace(World(2, devices).worker(rank), sent_as_factors=("0.weight",), shards_optimizer=True)
    return captured_model(model, devices).evolve(workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_of_factors_each_worker_makes_what_it_updates(devices: int) -> None:
    """All get the factors, and gather what was updated; sums of other buckets go to whom updates them."""
    made = []
    for rank in (0, 1):
        program = run_until(sending(rank, devices), "shard-optimizer")
        graph = program.mirrored_graph
        (sent,) = [bucket for bucket in program.buckets if bucket.is_sent_as_factors]
        (launch,) = targets(graph, ops.gather_factors)
        assert [bucket_of(node) for node in targets(graph, ops.gather_parameters)][-1] == 0 <= sent.index
        assert len(targets(graph, ops.gather_parameters)) == len(program.buckets) > 1
        assert len(targets(graph, ops.scatter_sums)) == len(program.buckets) - 1 and not targets(graph, ops.exchange)
        for wait in sorted(launch.users):
            start, stop = sent.updated(replica_of(wait) or 0, devices)
            assert wait.meta["val"].shape == (stop - start,)
            part = BucketParts(program).of(wait)
            assert part is not None and part.holds(GRADIENTS, sent.index, start, stop, range(2 * devices))
            made.append((start, stop))
    assert [start for start, _ in made] == [0, *(stop for _, stop in made[:-1])] and made[-1][1] == sent.num_elements


@pytest.mark.slow
def test_it_says_what_is_sent_besides_factors() -> None:
    program = run_until(sending(0, 1), "shard-optimizer")
    (dealt,) = [one.text for one in program.remarks if "updates its part" in one.text]
    assert "updates its part of 3 buckets, " in dealt
    assert "sends 1.0 KiB of sums and 2.0 KiB of new parameters in a step" in dealt
    (sent,) = [one.text for one in program.remarks if "sent as factors" in one.text]
    assert sent.endswith("and every worker makes its part of the sum from those of all, in the order of ranks")


def test_a_process_on_its_own_has_nothing_to_deal_out() -> None:
    program = run_passes(handmade(2, LARGE), default_pipeline(shard_optimizer=True, **SMALL_BUCKETS), [Verify()])  # type: ignore[arg-type]
    assert all(bucket.part is None for bucket in program.buckets)
    assert not targets(next(iter(program.device_graphs.values())).graph, ops.scatter_sums, ops.gather_parameters)


@pytest.mark.slow
def test_what_accumulates_lies_as_in_the_step_that_updates() -> None:
    for kind in (Accumulation.NONE, Accumulation.ADDS, Accumulation.ENDS):
        program = captured(World(2, 2), 0).evolve(accumulation=kind)
        pipeline = default_pipeline(over_workers=True, shard_optimizer=True, **SMALL_BUCKETS)  # type: ignore[arg-type]
        left = for_accumulation(pipeline) if program.accumulates else pipeline
        lowered = run_passes(program, left, [Verify()])
        assert all(bucket.part is not None for bucket in lowered.buckets)


def test_an_update_that_is_not_element_wise_stays_whole() -> None:
    program = ReduceOverWorkers().run(run_until(captured(World(2), 0), "share-parameters"))
    first, *others = program.buckets
    kept = ShardOptimizer().run(program.evolve(buckets=(dataclasses.replace(first, rule=MUON), *others)))
    assert [bucket.part is None for bucket in kept.buckets] == [True, False, False]
    assert [bucket_of(node) for node in targets(kept.mirrored_graph, ops.exchange)] == [0]
    assert kept.remarks[-1].text == (
        "bucket 0: updated whole by every worker, because Muon group 0 does not work element by element"
    )


def test_buckets_that_are_not_padded_are_refused() -> None:
    program = run_until(captured(World(3), 0, is_sharded=False), "reduce-over-workers")
    with pytest.raises(PassError, match=r"elements of bucket \d+ have no 3 equal parts\n  why:  'plan-buckets' pads"):
        ShardOptimizer().run(program)


def test_it_needs_sums_over_all_workers() -> None:
    with pytest.raises(PassError, match="'reduce-over-workers' must come before it"):
        ShardOptimizer().run(run_until(captured(World(2), 0), "share-parameters"))


def test_a_program_that_is_to_be_sharded_needs_the_pass() -> None:
    pipeline = default_pipeline(over_workers=True, **SMALL_BUCKETS)  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match="has no part of this worker; run 'shard-optimizer'"):
        run_passes(captured(World(2), 0), pipeline, [Verify()])


@pytest.mark.parametrize("rank", range(3))
def test_all_workers_exchange_the_norms_of_their_parts(rank: int) -> None:
    """Of a bucket that each worker updates whole, each measures as many elements as another one."""
    program = ReduceOverWorkers(needs_all_sums="clip_grad_norm").run(
        run_until(captured(World(3), rank), "share-parameters")
    )
    first, *others = program.buckets
    program = program.evolve(buckets=(dataclasses.replace(first, rule=MUON), *others))
    clipped = ClipGradients(1.0).run(ShardOptimizer().run(program))
    graph = clipped.mirrored_graph
    (own,) = targets(graph, torch.ops.aten.slice.Tensor)
    length = first.num_elements // 3
    assert own.args[1:] == (0, rank * length, (rank + 1) * length)
    for commit in targets(graph, ops.commit):
        assert commit.meta["val"].shape == (1, 3)
    measured = [Norms(clipped).of(norm) for norm in targets(graph, ops.norm) if norm.args[0].target is ops.commit]  # type: ignore[union-attr]
    assert measured
    for one in measured:
        assert one is not None and one.is_exchanged
        spans = sorted((p.bucket, s.start, s.stop) for p in one.parts if p is not None for s in p.spans)
        for bucket in clipped.buckets:
            found = [(start, stop) for index, start, stop in spans if index == bucket.index]
            part = bucket.part or Elements(rank * length, (rank + 1) * length)
            assert (found[0][0], found[-1][1]) == (part.start, part.stop)
            assert sum(stop - start for start, stop in found) == part.stop - part.start


def test_a_group_that_every_worker_updates_whole_is_measured_by_each() -> None:
    program = ReduceOverWorkers(needs_all_sums="clip_grad_norm").run(
        run_until(captured(World(2), 1), "share-parameters")
    )
    first, *others = program.buckets
    whole = dataclasses.replace(MUON, group=1)
    program = program.evolve(buckets=(dataclasses.replace(first, rule=whole), *others))
    clipped = ClipGradients((1.0, 2.0)).run(ShardOptimizer().run(program))
    norms = [node for node in targets(clipped.mirrored_graph, ops.norm) if node.args[0].target is not ops.commit]  # type: ignore[union-attr]
    parts = [Norms(clipped).of(norm) for norm in norms]
    exchanged = [any(user.target is ops.commit for user in norm.users) for norm in norms]
    assert sorted(zip(exchanged, [len(one.parts) for one in parts if one], strict=True)) == [(False, 1), (True, 2)]
    assert not targets(clipped.mirrored_graph, torch.ops.aten.slice.Tensor)


def test_what_is_computed_of_a_sum_is_computed_of_the_part() -> None:
    program = ReduceOverWorkers().run(run_until(captured(World(2, 2), 0), "share-parameters"))
    for launch in targets(program.mirrored_graph, ops.exchange):
        for wait in list(launch.users):
            neg = program.mirrored_graph.create_node("call_function", torch.ops.aten.neg.default, (wait,))
            wait.append(neg)
            neg.meta["val"] = wait.meta["val"]
            for user in [user for user in wait.users if user is not neg]:
                user.replace_input_with(wait, neg)
    sharded = ShardOptimizer().run(program)
    verify(sharded)
    for update in targets(sharded.mirrored_graph, ops.update):
        start, stop = sharded.buckets[bucket_of(update)].updated(replica_of(update) or 0, 2)
        assert update.all_input_nodes[0].meta["val"].shape == (stop - start,)


@pytest.mark.slow
@fuzzed(8)
@given(
    per_worker=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    halves=st.sets(st.integers(0, 5)),
    cap=st.integers(1, 4000),
)
def test_every_element_has_one_worker_and_all_have_one_schedule(
    per_worker: list[int], sizes: list[int], halves: set[int], cap: int
) -> None:
    dtypes = [torch.float16 if place in halves else torch.float32 for place in range(len(sizes))]
    weights = [Weight(f"w{i}", (n,), dtype) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    world = World(len(per_worker), per_worker)
    schedules = set()
    parts: list[list[tuple[int, int]]] = []
    for rank in range(len(per_worker)):
        options = {"buckets": ByBytes(cap / 2**20, cap / 2**20)}
        program = run_until(captured(world, rank, weights), "lower-devices", **options)
        schedules.add((worker_schedule(program), schedule_hash(program)))
        assert len(worker_schedule(program)) == 1 + 2 * len(program.buckets)
        for bucket in program.buckets:
            parts += [[]] if not rank else []
            own = [bucket.updated(replica, per_worker[rank]) for replica in range(per_worker[rank])]
            parts[bucket.index] += [elements for elements in own if elements[0] < elements[1]]
    assert len(schedules) == 1
    for bucket, found in zip(program.buckets, parts, strict=True):
        assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
        assert found[-1][1] == bucket.num_elements
