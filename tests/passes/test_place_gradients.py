import pytest
import torch
from tiny_programs import SMALL_BUCKETS, Weight, captured_two_layers, handmade, outputs, run_up_to, targets
from torch import fx

from mirrorc.custom_ops import matmul
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
    assert used.count(matmul.mm_into) == 2  # fc1.weight, fc2.weight
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
