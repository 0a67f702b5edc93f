from dataclasses import replace
from itertools import pairwise

import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, captured_model, handmade, targets
from torch import fx, nn

from mirrorc import World
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, region_calls, replica_of
from mirrorc.ir.program import Accumulation, Program
from mirrorc.ir.variables import SHARE_ELEMENTS
from mirrorc.passes import OverlapNextStep, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify

WEIGHTS = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))]


class Deep(nn.Sequential):
    """Layers of one size, so that the last third of their gradients is that of several layers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(6, 6, bias=False) for _ in range(9)))


def over(world: World, rank: int, weights: list[Weight] = WEIGHTS) -> Program:
    workers = world.worker(rank)
    return handmade(workers.devices_per_worker[rank], weights, buffer=True).evolve(workers=workers)


def run_until(program: Program, last: str, **options: object) -> Program:
    given = {"over_workers": True, "overlap_next_step": True, **SMALL_BUCKETS, **options}
    pipeline = default_pipeline(**given)  # type: ignore[arg-type]
    names = [one.name for one in pipeline]
    return run_passes(program, pipeline[: names.index(last) + 1], [Verify()])


def behind(graph: fx.Graph, replica: int) -> list[tuple[str, int]]:
    """The operations of a replica behind its handing over, with their buckets."""
    (begin,) = [node for node in targets(graph, ops.hand_over) if replica_of(node) == replica]
    own = [node for node in graph.nodes if node > begin and node.op == "call_function" and replica_of(node) == replica]
    return [(node.target.__name__, bucket_of(node)) for node in own if node.target in (ops.wait, ops.update)]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_launched_behind_the_last_region_is_updated_when_the_caller_has_its_loss(rank: int) -> None:
    program = run_until(over(World(3, (1, 2, 1)), rank), "overlap-next-step")
    graph = program.mirrored_graph
    last = max(region_calls(graph))
    late = [bucket_of(node) for node in targets(graph, ops.exchange) if node > last]
    assert late and late[-1] == len(program.buckets) - 1
    for replica in range(program.num_replicas):
        found = behind(graph, replica)
        assert [bucket for name, bucket in found if name == "wait"] == late
        (begin,) = [node for node in targets(graph, ops.hand_over) if replica_of(node) == replica]
        writes = [node for node in targets(graph, ops.write) if replica_of(node) == replica]
        assert writes and max(writes) < begin  # buffers are those of the step when it returns
        awaited = [bucket_of(node) for node in targets(graph, ops.await_update) if replica_of(node) == replica]
        assert sorted(awaited) == late
    whole = run_until(over(World(3, (1, 2, 1)), rank), "insert-update").mirrored_graph
    assert len(targets(graph, ops.update)) <= len(targets(whole, ops.update)), "a share may be empty"


def test_forward_is_cut_where_each_of_the_last_buckets_is_needed() -> None:
    program = captured_model(Deep(), 1, columns=6).evolve(workers=World(2).worker(0))
    lowered = run_until(program, "lower-devices", bucket_cap_mb=100 / 2**20, first_bucket_mb=100 / 2**20)
    (graph,) = lowered.graphs()
    forward = [node for node in region_calls(graph) if lowered.regions[str(node.target)].phase == "forward"]
    awaits = targets(graph, ops.await_update)
    assert len(awaits) > 1 and len(forward) >= len(awaits)
    between = [sum(one < node < other for node in forward) for one, other in pairwise(awaits)]
    assert all(between), "a region runs between two of them"
    order = [slot.variable for node in awaits for slot in lowered.buckets[bucket_of(node)].slots]
    assert order == sorted(order), "the layers that forward reads first come first"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_large_layer_that_forward_reads_last_some_is_sent_behind_what_it_reads_sooner(rank: int) -> None:
    weights = [*(Weight(f"w{i}", (200,)) for i in range(4)), Weight("head", (4000,))]
    program = run_until(over(World(3, (1, 2, 1)), rank, weights), "lower-devices")
    head = program.buckets[0]
    for graph in program.graphs():
        sent = [(bucket_of(node), node > max(region_calls(graph))) for node in targets(graph, ops.exchange)]
        is_launched_at_once = program.num_replicas == 1  # otherwise devices meet for it when the next one is launched
        assert sent[0] == (0, not is_launched_at_once) and sent[-1] == (0, True) and len(sent) > 3
        assert all(bucket != head.index and is_late for bucket, is_late in sent[1:-1])
        awaited = [bucket_of(node) for node in targets(graph, ops.await_update)]
        assert awaited[-1] == head.index and len(awaited) == len(program.buckets), "forward reads it last"
        begin = targets(graph, ops.hand_over)[0]
        waits = [bucket_of(node) for node in targets(graph, ops.wait) if node > begin]
        assert waits[-2:] == [head.index] * 2 and head.index not in waits[:-2]
    late = head.packs[-1]
    num_late = late.num_elements + sum(bucket.num_elements for bucket in program.buckets[1:])
    assert 0 <= num_late - sum(bucket.num_elements for bucket in program.buckets) / 3 < SHARE_ELEMENTS + 64


@pytest.mark.parametrize("rank", [0, 1])
def test_gathers_of_new_parameters_are_in_flight_where_workers_update_parts(rank: int) -> None:
    workers = replace(World(3, (1, 2, 1)).worker(rank), shards_optimizer=True)
    program = over(World(3, (1, 2, 1)), rank).evolve(workers=workers)
    graph = run_until(program, "overlap-next-step", shard_optimizer=True).mirrored_graph
    gathers = [bucket_of(node) for node in targets(graph, ops.gather_parameters)]
    begins = targets(graph, ops.hand_over)
    assert len(gathers) > 1 and len(begins) == program.num_replicas
    assert max(targets(graph, ops.gather_parameters, ops.update, ops.write)) < min(begins)
    for replica in range(program.num_replicas):
        assert behind(graph, replica) == [("wait", bucket) for bucket in gathers]
        awaited = [bucket_of(node) for node in targets(graph, ops.await_update) if replica_of(node) == replica]
        assert sorted(awaited) == sorted(gathers)


def test_forward_is_cut_where_each_bucket_is_needed_if_workers_update_parts() -> None:
    workers = replace(World(2).worker(0), shards_optimizer=True)
    program = captured_model(Deep(), 1, columns=6).evolve(workers=workers)
    small = {"bucket_cap_mb": 100 / 2**20, "first_bucket_mb": 100 / 2**20}
    lowered = run_until(program, "lower-devices", shard_optimizer=True, **small)
    (graph,) = lowered.graphs()
    forward = [node for node in region_calls(graph) if lowered.regions[str(node.target)].phase == "forward"]
    awaits = targets(graph, ops.await_update)
    assert len(awaits) == len(lowered.buckets) > 3 and len(forward) >= len(awaits)
    assert [bucket_of(node) for node in awaits] == [bucket_of(node) for node in targets(graph, ops.gather_parameters)]
    assert all(any(one < node < other for node in forward) for one, other in pairwise(awaits))


def test_parts_must_be_dealt_out_before() -> None:
    workers = replace(World(2).worker(0), shards_optimizer=True)
    program = run_until(over(World(2), 0).evolve(workers=workers), "reduce-over-workers")
    with pytest.raises(PassError, match="'shard-optimizer' must come before it"):
        run_passes(program, [OverlapNextStep()])


def test_nothing_is_handed_over_where_every_worker_updates_all_whole() -> None:
    workers = replace(World(2).worker(0), shards_optimizer=True)
    weights = [Weight("a", (4,), rule=MUON), Weight("b", (4,), rule=MUON)]
    program = run_until(over(World(2), 0, weights).evolve(workers=workers), "overlap-next-step", shard_optimizer=True)
    assert not targets(program.mirrored_graph, ops.hand_over)
    assert "nothing to hand over: every worker updates all buckets whole" in str(program.remarks)


def test_buckets_whose_optimizer_needs_them_whole_are_updated_in_the_step() -> None:
    program = run_until(
        over(World(2), 0, [Weight("a", (4,), rule=MUON), Weight("b", (4,), rule=MUON)]), "overlap-next-step"
    )
    assert not targets(program.mirrored_graph, ops.hand_over)
    (remark,) = [one.text for one in program.remarks if one.by == "overlap-next-step"]
    assert remark.startswith("nothing to hand over: no bucket that is sent whole, and updated element by element")


def test_nothing_is_handed_over_where_all_sums_come_before_the_commit() -> None:
    program = run_until(over(World(2), 0), "overlap-next-step", early_update=False)
    assert not targets(program.mirrored_graph, ops.hand_over)
    assert "nothing to hand over: all sums are needed before the commit" in str(program.remarks)


def test_one_worker_hands_nothing_over() -> None:
    program = run_until(handmade(2, WEIGHTS), "lower-devices", over_workers=False)
    assert not any(targets(graph, ops.hand_over, ops.await_update) for graph in program.graphs())


def test_a_step_that_ends_an_accumulation_hands_over_too() -> None:
    program = over(World(2), 0).evolve(accumulation=Accumulation.ENDS)
    assert behind(run_until(program, "overlap-next-step").mirrored_graph, 0)


def test_sums_must_be_exchanged_before() -> None:
    program = run_until(over(World(2), 0), "share-parameters")
    with pytest.raises(PassError, match="'reduce-over-workers' must come before it"):
        run_passes(program, [OverlapNextStep()])
