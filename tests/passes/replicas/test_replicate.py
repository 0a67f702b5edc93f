import pytest
from tiny_programs import SMALL_BUCKETS, handmade, outputs, run_before, run_up_to, targets

from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Stage
from mirrorc.passes import Replicate


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_every_node_is_there_once_for_each_replica(num_devices: int) -> None:
    before = run_before("replicate", handmade(num_devices, buffer=True), **SMALL_BUCKETS)
    program = Replicate().run(before)
    single = [n.target for n in before.shard_graphs[0].nodes if n.op == "call_function"]
    for replica in range(num_devices):
        own = [n for n in program.mirrored_graph.nodes if n.op != "output" and replica_of(n) == replica]
        assert [n.target for n in own if n.target is not ops.argument] == single
        assert [n.kwargs["name"] for n in own if n.target is ops.argument] == ["x", "loss_weight"]
    assert program.stage is Stage.REPLICATED and program.shard_graphs == ()


def test_no_edge_joins_two_replicas() -> None:
    graph = run_up_to("replicate", handmade(3), **SMALL_BUCKETS).mirrored_graph
    for node in graph.nodes:
        if node.op != "output":
            assert {replica_of(source) for source in node.all_input_nodes} <= {replica_of(node)}


def test_replicas_take_turns() -> None:
    graph = run_up_to("replicate", handmade(2), **SMALL_BUCKETS).mirrored_graph
    order = [(call.kwargs["region"], call.kwargs["replica"]) for call in targets(graph, ops.call_region)]
    assert order == [("fwd_0", 0), ("fwd_0", 1), ("bwd_0", 0), ("bwd_0", 1), ("bwd_1", 0), ("bwd_1", 1)]


def test_each_replica_runs_the_graph_of_its_shard_shape() -> None:
    graph = run_up_to("replicate", handmade(3, uneven=True), **SMALL_BUCKETS).mirrored_graph
    forward = {c.kwargs["replica"]: c.kwargs["region"] for c in targets(graph, ops.call_region)
               if str(c.kwargs["region"]).startswith("fwd")}  # fmt: skip
    rows = {n.kwargs["replica"]: n.meta["val"].size(0) for n in targets(graph, ops.argument) if n.kwargs["name"] == "x"}
    assert forward == {0: "fwd_0", 1: "fwd_0", 2: "fwd_0_shard1"}
    assert rows == {0: 2, 1: 2, 2: 1}


def test_outputs_list_every_replica_in_order() -> None:
    found = outputs(run_up_to("replicate", handmade(3, buffer=True)).mirrored_graph)
    for nodes in (found["losses"], *found["gradients"].values(), *found["writes"].values()):
        assert [replica_of(node) for node in nodes] == [0, 1, 2]
    assert list(found["gradients"]) == ["fc2.weight", "fc1.weight"] and list(found["writes"]) == ["stat"]
