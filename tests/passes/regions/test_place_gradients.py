import pytest
import torch
from tiny_programs import (
    SMALL_BUCKETS,
    Weight,
    captured_model,
    captured_two_layers,
    handmade,
    outputs,
    run_up_to,
    targets,
)
from torch import fx, nn

from mirrorc.analysis.buckets.slots_of_values import slot_of
from mirrorc.custom_ops import out_products
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.program import Program, Stage
from mirrorc.passes import PlaceGradients
from mirrorc.verifier.verifier import verify

aten = torch.ops.aten


def outlined(program: Program) -> Program:
    return run_up_to("outline-regions", program, **SMALL_BUCKETS)


def body(program: Program, region: str) -> fx.Graph:
    return program.regions[region].graph_module.graph


def test_regions_are_given_the_slots_of_their_gradients() -> None:
    program = PlaceGradients().run(outlined(handmade()))
    verify(program)
    assert program.stage is Stage.OUTLINED
    graph = program.shard_graphs[0]
    assert [n.kwargs for n in targets(graph, ops.slot)] == [
        {"bucket": 0, "variable": "fc2.weight"},
        {"bucket": 1, "variable": "fc1.weight"},
    ]
    for call in targets(graph, ops.call_region)[1:]:
        placeholders = [n for n in body(program, str(call.kwargs["region"])).nodes if n.op == "placeholder"]
        assert call.args[-1].target is ops.slot and len(placeholders) == len(call.args)
        assert placeholders[-1].meta["val"].shape == call.args[-1].meta["val"].shape


def test_a_matrix_product_is_computed_into_its_slot_and_others_are_copied() -> None:
    program = PlaceGradients().run(outlined(captured_two_layers()))
    verify(program)
    used = [n.target for r in program.regions.values() for n in r.graph_module.graph.nodes if n.op == "call_function"]
    assert used.count(out_products.mm_into) == 2  # fc1.weight, fc2.weight
    assert used.count(aten.copy_.default) == 2  # fc1.bias, fc2.bias


def test_running_twice_is_refused() -> None:
    with pytest.raises(PassError, match="write into slots already: leave one of them out"):
        PlaceGradients().run(PlaceGradients().run(outlined(handmade())))


def test_a_region_writes_its_gradient_and_gives_the_same_values() -> None:
    before = outlined(handmade())
    after = PlaceGradients().run(before)
    arguments = (torch.arange(3.0), torch.tensor(2.0))
    slot = torch.zeros(3)
    (expected,) = before.regions["bwd_0"].graph_module(*arguments)
    (found,) = after.regions["bwd_0"].graph_module(*arguments, slot)
    assert torch.equal(found, expected) and torch.equal(slot, expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 6, padding_idx=1), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table((x > 0).long()).sum(1)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 7])
def test_rows_of_a_tied_table_are_added_to_the_product_in_its_slot(rows: int) -> None:
    before = outlined(captured_model(Tied(), rows=rows))
    after = PlaceGradients().run(before)
    verify(after, before=before)
    assert "of 3 gradients, 2 computed into their slots" in after.remarks[-1].text
    for graph in after.shard_graphs:
        first, last = (c for c in targets(graph, ops.call_region) if "table.weight" in c.kwargs["gradients"])
        (slot,) = (n for n in targets(graph, ops.slot) if n.kwargs["variable"] == "table.weight")
        assert list(slot.users) == [first] and slot_of(outputs(graph)["gradients"]["table.weight"]) is slot
        (added,) = targets(body(after, last.kwargs["region"]), out_products.add_rows_into)
        assert added.args[-1] == 1 and added.args[0].op == "placeholder"
        assert not targets(body(after, last.kwargs["region"]), aten.embedding_dense_backward.default)


def test_rows_are_not_added_in_place_to_a_product_that_is_read_elsewhere() -> None:
    before = outlined(captured_model(Tied()))
    (graph,) = before.shard_graphs
    last = targets(graph, ops.call_region)[-1]
    product = next(n for n in last.all_input_nodes if tuple(n.meta["val"].shape) == (9, 6) and n.target is not ops.read)
    found = outputs(graph)
    graph.output_node().args = ({**found, "writes": {"copy": product}},)
    after = PlaceGradients().run(before)
    used = [n.target for r in after.regions.values() for n in r.graph_module.graph.nodes]
    assert out_products.add_rows_into not in used


def test_a_gradient_that_two_variables_share_is_left_to_pack() -> None:
    program = outlined(handmade(weights=[Weight("a"), Weight("b")]))
    graph = program.shard_graphs[0]
    found = outputs(graph)
    both = dict.fromkeys(found["gradients"], found["gradients"]["b"])
    graph.output_node().args = ({**found, "gradients": both},)
    after = PlaceGradients().run(program)
    assert "a" not in {n.kwargs["variable"] for n in targets(after.shard_graphs[0], ops.slot)}


def test_the_program_given_is_not_changed() -> None:
    program = outlined(handmade())
    before = [str(program.shard_graphs[0]), *(str(r.graph_module.graph) for r in program.regions.values())]
    PlaceGradients().run(program)
    assert [str(program.shard_graphs[0]), *(str(r.graph_module.graph) for r in program.regions.values())] == before
