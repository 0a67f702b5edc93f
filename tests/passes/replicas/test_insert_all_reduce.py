import pytest
from tiny_programs import SMALL_BUCKETS, handmade, outputs, run_up_to, targets
from torch.testing import FileCheck

from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Stage


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_one_all_reduce_for_each_bucket_joins_all_replicas(num_devices: int) -> None:
    program = run_up_to("insert-all-reduce", handmade(num_devices), **SMALL_BUCKETS)
    reduces = targets(program.mirrored_graph, ops.all_reduce)
    assert program.stage is Stage.REDUCED
    assert [node.kwargs for node in reduces] == [{"bucket": 0, "op": "sum"}, {"bucket": 1, "op": "sum"}]
    for node in reduces:
        assert [replica_of(n) for n in node.args] == list(range(num_devices))
        assert all(n.target is ops.pack and n.kwargs["bucket"] == node.kwargs["bucket"] for n in node.args)
        assert isinstance(node.meta["val"], ops.Pending)
        assert [user.kwargs["replica"] for user in node.users] == list(range(num_devices))
        assert all(user.target is ops.wait for user in node.users)


def test_the_order_reverses_the_forward() -> None:
    text = run_up_to("insert-all-reduce", handmade(2), **SMALL_BUCKETS).to_text(fold=False)
    FileCheck().check("bucket 0").check_same("fc2.weight").check("bucket 1").check_same("fc1.weight").check(
        "all   | b0_pending"
    ).check("cpu:0 | b0_sum").check("cpu:1 | b0_sum").check("bwd_1").check("all   | b1_pending").run(text)


def test_one_replica_has_nothing_to_reduce() -> None:
    program = run_up_to("insert-all-reduce", handmade(1), **SMALL_BUCKETS)
    assert not targets(program.mirrored_graph, ops.all_reduce, ops.wait)
    assert all(node.target is ops.pack for (node,) in outputs(program.mirrored_graph)["reduced"])


def test_waits_give_what_was_packed() -> None:
    for node in targets(run_up_to("insert-all-reduce", handmade(2)).mirrored_graph, ops.wait):
        packed = node.args[0].args[0]
        assert node.meta["val"].shape == packed.meta["val"].shape
