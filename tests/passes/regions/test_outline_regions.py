import pytest
import torch
from tiny_programs import (
    SMALL_BUCKETS,
    captured_model,
    captured_two_layers,
    handmade,
    run_up_to,
    targets,
)
from torch import nn

from mirrorc.ir import ops
from mirrorc.ir.program import Program, Region
from mirrorc.passes import OutlineRegions
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify


def outlined(program: Program) -> Program:
    return run_up_to("outline-regions", program, **SMALL_BUCKETS)


@pytest.mark.slow
def test_regions_hold_all_operators_of_the_graph_and_no_more() -> None:
    captured = captured_two_layers()
    program = outlined(captured)
    before = [n.target for n in captured.shard_graphs[0].nodes if n.op == "call_function" and n.target is not ops.read]
    inside = [n.target for r in program.regions.values() for n in r.graph_module.graph.nodes if n.op == "call_function"]
    assert inside == before


@pytest.mark.slow
def test_a_region_of_another_shard_shape_is_called_after_its_counterpart() -> None:
    program = outlined(captured_two_layers(3, rows=8))
    first, second = (
        [call.kwargs["region"] for call in targets(graph, ops.call_region)] for graph in program.shard_graphs
    )
    assert first == ["fwd_0", "bwd_0", "bwd_1", "bwd_2", "bwd_3"]
    assert second == [f"{name}_shard1" for name in first]
    assert list(program.regions) == [*first, *second]
    assert "= bwd_0.shard1(" in program.to_text() and "\nregion bwd_0.shard1(" in program.to_text(regions=True)


@pytest.mark.parametrize("program", [handmade(buffer=True), captured_two_layers()], ids=["handmade", "captured"])
def test_calls_match_their_regions(program: Program) -> None:
    after = outlined(program)
    for call in targets(after.shard_graphs[0], ops.call_region):
        graph = after.regions[str(call.kwargs["region"])].graph_module.graph
        expected = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        given = [n.meta["val"] for n in call.all_input_nodes]
        assert [(v.shape, v.dtype, v.stride()) for v in given] == [(v.shape, v.dtype, v.stride()) for v in expected]
        assert [user.args[1] for user in call.users] == list(range(len(graph.output_node().args[0])))


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "rows", "stays"), [(512, 8, True), (6, 8, False)])
def test_a_value_that_a_much_smaller_product_alone_reads_does_not_pass_a_cut(
    classes: int, rows: int, stays: bool
) -> None:
    """The gradient of many logits is read within its region; that of few, which is no larger than what is made of it, leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, classes, bias=False))
    planned = run_up_to("plan-buckets", captured_model(model, rows=rows), **SMALL_BUCKETS)
    cut, whole = (run_passes(planned, [OutlineRegions(min_bytes=n)]) for n in (1024, 2**20))
    verify(cut)
    shapes = {name: _leaving(p.regions["bwd_0"]) for name, p in (("cut", cut), ("whole", whole))}
    logits = (rows // 2, classes)
    assert logits in shapes["whole"]
    assert (logits in shapes["cut"]) != stays and ((rows // 2, 6) in shapes["cut"]) >= stays


def _leaving(region: Region) -> list[tuple[int, ...]]:
    (results,) = region.graph_module.graph.output_node().args
    return [tuple(result.meta["val"].shape) for result in results]  # type: ignore[union-attr]


def test_the_program_given_is_not_changed() -> None:
    program = run_up_to("plan-buckets", handmade(), **SMALL_BUCKETS)
    before = str(program.shard_graphs[0])
    outlined(program)
    assert str(program.shard_graphs[0]) == before and not program.regions
