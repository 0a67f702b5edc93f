import operator

import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, outputs, run_up_to, targets
from torch.testing import FileCheck

from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Stage

MIXED = [Weight("a", rule=MUON), Weight("b"), Weight("c", (2, 2), rule=MUON)]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_each_replica_updates_each_bucket_once_from_its_sum(num_devices: int) -> None:
    program = run_up_to("insert-update", handmade(num_devices), **SMALL_BUCKETS)
    updates = targets(program.mirrored_graph, ops.update)
    assert program.stage is Stage.UPDATED
    assert [(n.kwargs["bucket"], n.kwargs["replica"]) for n in updates] == [
        (bucket, replica) for bucket in (0, 1) for replica in range(num_devices)
    ]
    for node in updates:
        assert node.args[0].target is (ops.wait if num_devices > 1 else ops.pack)
        assert node.args[0].kwargs["bucket"] == node.kwargs["bucket"]
        assert replica_of(node.args[0]) == node.kwargs["replica"]


def test_updates_come_after_every_read_and_region() -> None:
    nodes = list(run_up_to("insert-update", handmade(2), **SMALL_BUCKETS).mirrored_graph.nodes)
    first_update = min(i for i, n in enumerate(nodes) if n.target is ops.update)
    assert all(i < first_update for i, n in enumerate(nodes) if n.target in (ops.read, ops.call_region))


def test_an_optimizer_that_is_not_elementwise_runs_once_and_its_parameters_are_broadcast() -> None:
    program = run_up_to("insert-update", handmade(2, MIXED), **SMALL_BUCKETS)
    (step,) = targets(program.mirrored_graph, ops.step_optimizer)
    whole = tuple(bucket.index for bucket in program.buckets if not bucket.rule.elementwise)
    assert step.kwargs == {"buckets": whole, "replica": 0}
    assert [replica_of(n) for n in step.args] == [0] * len(whole)
    broadcasts = targets(program.mirrored_graph, ops.broadcast)
    assert [n.kwargs["bucket"] for n in broadcasts] == list(whole) and [
        (n.args[0].target, n.args[0].args) for n in broadcasts
    ] == [(operator.getitem, (step, place)) for place in range(len(whole))]
    assert [tuple(value.shape) for value in step.meta["val"]] == [(program.buckets[i].num_elements,) for i in whole]
    stores = targets(program.mirrored_graph, ops.store)
    assert [(n.kwargs["bucket"], n.kwargs["replica"]) for n in stores] == [(index, 1) for index in whole]
    FileCheck().check_count("update(bucket=1", 2, exactly=True).check("step_optimizer(b0_sum, b2_sum)").run(
        program.to_text(fold=False)
    )


def test_one_replica_broadcasts_nothing() -> None:
    graph = run_up_to("insert-update", handmade(1, MIXED)).mirrored_graph
    assert len(targets(graph, ops.step_optimizer)) == 1
    assert not targets(graph, ops.broadcast, ops.store)


def test_per_replica_variables_are_written_by_every_replica() -> None:
    graph = run_up_to("insert-update", handmade(2, buffer=True)).mirrored_graph
    assert [n.kwargs for n in targets(graph, ops.write)] == [{"variable": "stat", "replica": r} for r in (0, 1)]
    assert list(outputs(graph)) == ["losses"]
