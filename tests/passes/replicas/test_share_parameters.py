import operator

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, Weight, handmade, run_up_to, targets

from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Placement
from mirrorc.passes import ShareParameters
from mirrorc.verifier.verifier import verify

aten = torch.ops.aten
LARGE = [Weight("a", (300,)), Weight("b", (300,))]


def scheduled(num_devices: int = 2, weights: list[Weight] = LARGE) -> Program:
    return run_up_to("schedule-overlap", handmade(num_devices, weights), **SMALL_BUCKETS)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_each_device_updates_its_share_of_one_copy(num_devices: int) -> None:
    program = ShareParameters().run(scheduled(num_devices))
    verify(program)
    assert program.stage is Stage.SCHEDULED
    assert {bucket.placement for bucket in program.buckets} == {Placement.SHARED}
    assert not targets(program.mirrored_graph, ops.all_reduce)
    assert [n.kwargs["bucket"] for n in targets(program.mirrored_graph, ops.reduce_scatter)] == [0, 1]
    for bucket in program.buckets:
        updates = [n for n in targets(program.mirrored_graph, ops.update) if n.kwargs["bucket"] == bucket.index]
        sizes = {n.kwargs["replica"]: n.args[0].meta["val"].numel() for n in updates}
        assert sum(sizes.values()) == bucket.num_elements and sorted(sizes) == list(range(num_devices))


@pytest.mark.parametrize("num_elements", [300, 4])
def test_all_that_is_computed_of_a_sum_moves_with_it(num_elements: int) -> None:
    """What an operator with several results gives, too; where a replica has no share, there is nothing to compute of it."""
    program = scheduled(2, [Weight("a", (num_elements,))])
    for wait in targets(program.mirrored_graph, ops.wait):
        extremes = insert(program, wait.next, aten.aminmax.default, (wait,))
        largest = insert(program, extremes.next, operator.getitem, (extremes, 1))
        insert(program, largest.next, aten.neg.default, (largest,))
    verify(program)
    after = ShareParameters().run(program)
    verify(after)
    updates, others = (targets(after.mirrored_graph, target) for target in (ops.update, aten.neg.default))
    assert len(updates) == len(others) == (2 if num_elements == 300 else 1)


def test_devices_without_a_common_memory_keep_their_copies_and_say_why() -> None:
    program = scheduled(2).evolve(devices=tuple(Device(f"cuda:{i}", torch.device("cuda", i)) for i in range(2)))
    after = ShareParameters().run(program)
    assert {bucket.placement for bucket in after.buckets} == {Placement.MIRRORED}
    assert str(after.mirrored_graph) == str(program.mirrored_graph)
    assert any("do not share one memory" in remark.text for remark in after.remarks)


def test_one_replica_has_nothing_to_share() -> None:
    program = scheduled(1)
    assert str(ShareParameters().run(program).mirrored_graph) == str(program.mirrored_graph)


def test_the_program_given_is_not_changed() -> None:
    program = scheduled(2)
    before = str(program.mirrored_graph)
    ShareParameters().run(program)
    assert str(program.mirrored_graph) == before and program.buckets[0].placement is Placement.MIRRORED


def test_running_twice_is_refused() -> None:
    with pytest.raises(PassError, match="shared already: leave one of them out"):
        ShareParameters().run(ShareParameters().run(scheduled(2)))
