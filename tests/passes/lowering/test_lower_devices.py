import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_before, run_up_to, targets
from torch.testing import FileCheck

from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Stage
from mirrorc.passes import LowerDevices

MIXED = [Weight("a", rule=MUON), Weight("b"), Weight("c")]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_every_device_gets_the_nodes_of_its_replica_and_its_part_of_collectives(num_devices: int) -> None:
    before = run_before("lower-devices", handmade(num_devices, MIXED, buffer=True), **SMALL_BUCKETS)
    program = LowerDevices().run(before)
    assert program.stage is Stage.LOWERED and program.graph is None
    assert list(program.device_graphs) == [f"cpu:{i}" for i in range(num_devices)]
    for replica, module in enumerate(program.device_graphs.values()):
        module.graph.lint()
        names = {ops.argument: "placeholder", ops.call_region: "call_module"}
        expected = [
            names.get(n.target, n.target)
            for n in before.mirrored_graph.nodes
            if n.op != "output" and replica_of(n) in (replica, None)
        ]
        found = [n.target if n.op == "call_function" else n.op for n in module.graph.nodes if n.op != "output"]
        assert found == expected
        assert not any("replica" in n.kwargs for n in module.graph.nodes)


def test_a_lowered_all_reduce_takes_one_bucket() -> None:
    for module in run_up_to("lower-devices", handmade(3)).device_graphs.values():
        (node,) = targets(module.graph, ops.all_reduce)
        assert len(node.args) == 1 and node.args[0].target is ops.pack
        assert node.kwargs == {"bucket": 0, "op": "sum", "link": "shared-memory"}


def test_only_the_root_steps_and_sends_and_only_the_others_receive_and_store() -> None:
    graphs = [m.graph for m in run_up_to("lower-devices", handmade(3, MIXED)).device_graphs.values()]
    assert not any(targets(graph, ops.broadcast) for graph in graphs)
    assert [len(targets(graph, ops.step_optimizer)) for graph in graphs] == [1, 0, 0]
    assert [[n.kwargs["destination"] for n in targets(graph, ops.send)] for graph in graphs] == [[1, 2], [], []]
    assert [[n.kwargs["source"] for n in targets(graph, ops.recv)] for graph in graphs] == [[], [0], [0]]
    assert [len(targets(graph, ops.store)) for graph in graphs] == [0, 1, 1]
    for graph in graphs[1:]:
        (store,) = targets(graph, ops.store)
        assert store.args[0].target is ops.wait and store.args[0].args == (targets(graph, ops.recv)[0],)


def test_region_modules_are_shared_not_copied() -> None:
    program = run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS)
    for name, region in program.regions.items():
        assert all(module.get_submodule(name) is region.graph_module for module in program.device_graphs.values())


def test_devices_hold_only_the_regions_that_they_run() -> None:
    program = run_up_to("lower-devices", handmade(2, uneven=True), **SMALL_BUCKETS)
    held = [{name for name, _ in module.named_children()} for module in program.device_graphs.values()]
    assert held == [{"fwd_0", "bwd_0", "bwd_1"}, {"fwd_0_shard1", "bwd_0", "bwd_1"}]


def test_a_devices_graph_gives_the_loss() -> None:
    graph = run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS).device_graphs["cpu:1"].graph
    FileCheck().check("x : [num_users=1] = placeholder").check("call_module[target=fwd_0]").check(
        "add_tensor_1 : [num_users=1] = call_function[target=operator.getitem](args = (%fwd_0, 0)"
    ).check("return add_tensor_1").run(str(graph))


def test_a_lowered_value_has_its_name_without_the_replica() -> None:
    before = run_before("lower-devices", handmade(2), **SMALL_BUCKETS).mirrored_graph
    for replica, module in enumerate(run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS).device_graphs.values()):
        mirrored = [n.name for n in before.nodes if n.op != "output" and replica_of(n) in (replica, None)]
        assert {f"x_r{replica}", f"fwd_0_r{replica}", f"b0_r{replica}", "b0_pending", f"b1_sum_r{replica}"} <= set(
            mirrored
        )
        found = [n.name for n in module.graph.nodes if n.op != "output"]
        assert found == [name.removesuffix(f"_r{replica}") for name in mirrored]
