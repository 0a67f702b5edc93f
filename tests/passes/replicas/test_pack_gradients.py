import pytest
from tiny_programs import SMALL_BUCKETS, Weight, handmade, outputs, run_before, run_up_to, targets

from mirrorc.ir import ops
from mirrorc.ir.program import Stage


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_one_pack_for_each_bucket_and_replica(num_devices: int) -> None:
    program = run_up_to("pack-gradients", handmade(num_devices), **SMALL_BUCKETS)
    packs = targets(program.mirrored_graph, ops.pack)
    assert program.stage is Stage.PACKED
    assert sorted((p.kwargs["bucket"], p.kwargs["replica"]) for p in packs) == [
        (bucket, replica) for bucket in (0, 1) for replica in range(num_devices)
    ]


def test_gradients_are_packed_in_the_order_of_the_slots() -> None:
    program = handmade(2, [Weight("a", (2,)), Weight("b", (3,)), Weight("c", (5,))])
    before = run_before("pack-gradients", program)
    gradients = outputs(before.mirrored_graph)["gradients"]
    packs = targets(run_up_to("pack-gradients", program).mirrored_graph, ops.pack)
    assert len(packs) == 2
    for replica, pack in enumerate(packs):
        assert [n.name for n in pack.args] == [gradients[name][replica].name for name in ("c", "b", "a")]
        assert [tuple(n.meta["val"].shape) for n in pack.args] == [(5,), (3,), (2,)]


def test_a_pack_stands_right_after_its_last_gradient() -> None:
    program = run_up_to("pack-gradients", handmade(2), **SMALL_BUCKETS)
    for pack in targets(program.mirrored_graph, ops.pack):
        assert pack.prev in pack.all_input_nodes


def test_a_packed_bucket_has_the_buckets_size_and_dtype() -> None:
    program = run_up_to("pack-gradients", handmade(1))
    value = targets(program.mirrored_graph, ops.pack)[0].meta["val"]
    assert (tuple(value.shape), value.dtype) == ((program.buckets[0].num_elements,), program.buckets[0].dtype)


def test_outputs_list_the_packs_by_bucket_and_replica() -> None:
    packed = outputs(run_up_to("pack-gradients", handmade(2), **SMALL_BUCKETS).mirrored_graph)["packed"]
    assert [[(p.kwargs["bucket"], p.kwargs["replica"]) for p in replicas] for replicas in packed] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]
