import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, every_stage, handmade, run_up_to, targets

import mirrorc
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.passes import LowerCollectives, LowerDevices, SpreadCopies, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import add_passes, select_passes
from mirrorc.verifier.verifier import verify

LARGE = [Weight("a", (300,)), Weight("b", (200,))]
ALL = SpreadCopies(min_elements=1, within_one_memory=True)


def spread(
    num_devices: int, one: SpreadCopies = ALL, weights: list[Weight] = LARGE, placement: str = "central"
) -> tuple[Program, Program]:
    before = every_stage(handmade(num_devices, weights), placement=placement, **SMALL_BUCKETS)["update-at-owner"]
    after = one.run(before)
    verify(after)
    lowered = run_passes(after, [LowerCollectives(), LowerDevices()])
    verify(lowered)
    return after, lowered


@pytest.mark.parametrize("num_devices", [3, 4])
@pytest.mark.parametrize("placement", ["central", "least-loaded"])
def test_an_owner_sends_each_element_once(num_devices: int, placement: str) -> None:
    program, lowered = spread(num_devices, placement=placement)
    assert not targets(program.mirrored_graph, ops.broadcast)
    for replica, graph in enumerate(lowered.graphs()):
        for bucket in lowered.buckets:
            sent = [node for node in targets(graph, ops.send) if node.kwargs["bucket"] == bucket.index]
            elements = sum(node.all_input_nodes[0].meta["val"].numel() for node in sent)
            if bucket.owner == replica:
                assert elements == bucket.num_elements and len(sent) == num_devices - 1
            else:
                each = bucket.num_elements / (num_devices - 1)
                assert len(sent) == num_devices - 2 and abs(elements - each * (num_devices - 2)) <= num_devices
            stores = [node for node in targets(graph, ops.store) if node.kwargs["bucket"] == bucket.index]
            assert len(stores) == (bucket.owner != replica)
    assert " · owned by " in lowered.to_text(fold=False)


def test_what_an_optimizer_has_stepped_by_itself_is_passed_on() -> None:
    program, _ = spread(3, weights=[Weight("a", (300,), rule=MUON)])
    assert len(targets(program.mirrored_graph, ops.send)) == 4


@pytest.mark.parametrize(
    ("num_devices", "one", "why"),
    [
        (2, ALL, "there is no third device"),
        (3, SpreadCopies(min_elements=10_000, within_one_memory=True), "no bucket is large enough"),
        (3, SpreadCopies(min_elements=1), "devices of one memory copy straight from the owner's"),
    ],
)
def test_where_nothing_is_passed_on_a_remark_says_why(num_devices: int, one: SpreadCopies, why: str) -> None:
    program, lowered = spread(num_devices, one)
    assert program.remarks[-1].text == f"no copy is passed on: {why}"
    assert len([node for graph in lowered.graphs() for node in targets(graph, ops.send)]) == 2 * (num_devices - 1)


def test_small_buckets_come_from_their_owner() -> None:
    weights = [Weight("a", (300,)), Weight("b", (20,))]
    program, _ = spread(3, SpreadCopies(min_elements=100, within_one_memory=True), weights)
    assert {node.kwargs["bucket"] for node in targets(program.mirrored_graph, ops.broadcast)} == {0}
    assert program.remarks[-1].text.startswith("1 bucket of 100 elements or more is copied in 2 chunks")


def test_it_needs_owners_and_comes_before_links() -> None:
    with pytest.raises(PassError, match="pass 'spread-copies' takes placed programs, but this one is not"):
        run_passes(run_up_to("schedule-overlap", handmade(3, LARGE)), [SpreadCopies()])
    pipeline = select_passes(default_pipeline(placement="central"), ["spread-copies"])
    late = add_passes(pipeline, [mirrorc.after("lower-collectives", SpreadCopies())])
    with pytest.raises(PassError, match="takes programs that are not linked yet"):
        run_passes(handmade(3, LARGE), late)
