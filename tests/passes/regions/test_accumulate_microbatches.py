import pytest
import torch
from tiny_programs import SMALL_BUCKETS, captured_model, captured_two_layers, every_stage, outputs, targets
from torch import fx, nn

from mirrorc.analysis.buckets.slots_of_values import slot_of
from mirrorc.custom_ops import out_products
from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.passes import AccumulateMicrobatches
from mirrorc.verifier.verifier import verify

PASS = AccumulateMicrobatches()


def microbatched(num_devices: int = 2, rows: int = 13, microbatches: int = 3) -> dict[str, Program]:
    captured = captured_two_layers(num_devices, rows, microbatches)
    return every_stage(captured, microbatches=microbatches, **SMALL_BUCKETS)


def factored(rows: int) -> dict[str, Program]:
    captured = captured_model(nn.Linear(40, 30), 2, rows, columns=40, microbatches=3)
    return every_stage(captured, microbatches=3, min_factored_elements=0, **SMALL_BUCKETS)


def called(graph: fx.Graph) -> list[str]:
    return [str(node.kwargs["region"]) for node in targets(graph, ops.call_region)]


@pytest.mark.slow
def test_a_graph_for_each_kind_of_shard_runs_its_microbatches_in_order() -> None:
    found = microbatched()
    before, after = found["place-gradients"], found[PASS.name]
    assert before.microbatches == after.microbatches == ((3, 2, 2), (2, 2, 2))
    assert before.shard_of_microbatch == ((0, 1, 1), (1, 1, 1)) and after.shard_of_microbatch == ()
    assert after.shard_of_replica == (0, 1) and len(after.shard_graphs) == 2
    first = after.shard_graphs[0]
    assert [node.kwargs["index"] for node in targets(first, ops.microbatch)] == [0, 0, 1, 1, 2, 2]
    assert called(first)[:6] == ["fwd_0", "bwd_0", "bwd_1", "bwd_2", "bwd_3", "fwd_0_shard1"]
    assert called(first)[6:10] == [f"bwd_{i}_adding_shard1" for i in range(4)]
    assert called(first)[5:10] == called(first)[10:]
    verify(after, before=before, after=PASS.name)
    verify(found["lower-devices"])


@pytest.mark.slow
def test_later_microbatches_add_in_the_slots_of_the_first() -> None:
    found = microbatched()
    graph = found[PASS.name].shard_graphs[0]
    assert len(targets(graph, ops.slot)) == 4
    for name, gradient in outputs(graph)["gradients"].items():
        assert slot_of(gradient) is next(n for n in targets(graph, ops.slot) if n.kwargs["variable"] == name)
    regions = found[PASS.name].regions
    used = [n.target for name, r in regions.items() if "adding" in name for n in r.graph_module.graph.nodes]
    assert out_products.mm_into not in used and out_products.addmm_into in used


def test_a_region_that_adds_gives_the_sum() -> None:
    regions = microbatched(1, 4, 2)[PASS.name].regions
    for name in [name for name in regions if "adding" not in name and "bwd" in name]:
        body, adding = (regions[own].graph_module for own in (name, f"{name}_adding"))
        values = [torch.rand(p.meta["val"].shape) for p in body.graph.find_nodes(op="placeholder")]
        values = [
            torch.zeros(value.shape, dtype=torch.int64) if p.meta["val"].dtype == torch.int64 else value
            for p, value in zip(body.graph.find_nodes(op="placeholder"), values, strict=True)
        ]
        slot = values[-1].clone()
        body(*values)
        written = values[-1].clone()
        adding(*values[:-1], slot_then := slot.clone())
        torch.testing.assert_close(slot_then, slot + written)


def test_gradients_that_stay_factors_have_those_of_all_microbatches() -> None:
    found = factored(rows=13)
    before, after, lowered = found["factor-gradients"], found[PASS.name], found["lower-devices"]
    verify(after, before=found["place-gradients"], after=PASS.name)
    assert before.microbatches == ((3, 2, 2), (2, 2, 2))
    shapes = [
        [tuple(factor.meta["val"].shape) for factor in targets(g, ops.product)[0].args] for g in after.shard_graphs
    ]
    assert shapes[0] == [(30, 3), (3, 40), (30, 2), (2, 40), (30, 2), (2, 40)]
    assert shapes[1] == [(30, 2), (2, 40)] * 3
    text = lowered.to_text()
    (one, other) = [line for line in text.splitlines() if " = product(" in line]
    assert "d(weight)" in one and "= product(bucket=0, left, right of 3 microbatches)" in one
    assert "# f32[30, 3] @ f32[3, 40] + 2 x (f32[30, 2] @ f32[2, 40]), made by shares" in one
    assert "# 3 x (f32[30, 2] @ f32[2, 40]), made by shares" in other


@pytest.mark.slow
def test_the_factors_of_all_microbatches_are_to_be_smaller() -> None:
    """40 x 30 elements; the factors have 70 for each row: 17 rows of a shard are fewer, 18 are not, whatever each part has."""
    assert targets(factored(rows=34)[PASS.name].shard_graphs[0], ops.product)
    stages = factored(rows=35)
    assert not any(targets(graph, ops.product) for graph in stages[PASS.name].shard_graphs)
    assert "no larger than their factors" in str(stages["factor-gradients"].remarks[-1])


@pytest.mark.slow
def test_the_verifier_refuses_a_microbatch_that_is_missing_twice_or_another() -> None:
    found = microbatched(1, 6, 2)
    before, after = found["place-gradients"], found[PASS.name]

    def refused(change: object) -> None:
        mutant = PASS.run(before)
        change(mutant.shard_graphs[0])  # type: ignore[operator]
        with pytest.raises(VerifyError, match="dataflow_is_preserved"):
            verify(mutant, before=before, after=PASS.name)

    def give(graph: fx.Graph, one: fx.Node, other: fx.Node) -> None:
        one.replace_all_uses_with(other)

    def same_examples(graph: fx.Graph) -> None:
        first, _, second, _ = targets(graph, ops.microbatch)
        give(graph, second, first)

    def unweighted(graph: fx.Graph) -> None:
        (half,) = [node for node in graph.nodes if node.name.startswith("loss_weight_mul")]
        give(graph, half, graph.find_nodes(op="placeholder")[2])

    def loss_of_the_last(graph: fx.Graph) -> None:
        output = outputs(graph)
        graph.output_node().args = ({**output, "loss": output["loss"].args[1].args[0]},)

    for change in (same_examples, unweighted, loss_of_the_last):
        refused(change)
    verify(after, before=before, after=PASS.name)


@pytest.mark.slow
def test_what_it_cannot_take_is_refused() -> None:
    captured = captured_two_layers(2, 8, 2)
    with pytest.raises(VerifyError, match="run 'accumulate-microbatches' before 'replicate'"):
        verify(every_stage(captured, **SMALL_BUCKETS)["replicate"])
    alone = captured_two_layers(2, 2, 2)
    assert alone.shard_of_microbatch == ()  # each shard has one example
    assert "no shard is run in microbatches" in str(every_stage(alone, microbatches=2)[PASS.name].remarks[-1])
