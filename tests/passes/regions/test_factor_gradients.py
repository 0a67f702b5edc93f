import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_programs import captured_model, handmade, outputs, run_up_to, sgd_step, targets
from torch import fx, nn
from torch.nn import functional as F

from mirrorc import World
from mirrorc.errors import PassError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.links import Link, register_link, unregister_link
from mirrorc.ir.program import Program, Stage
from mirrorc.packing import ByBytes
from mirrorc.passes import FactorGradients, default_pipeline, resolve_sharing
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify

aten = torch.ops.aten


class TwoLayers(nn.Module):
    """A first layer whose gradient is larger than its factors, for few rows; and a second whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(40, 30), nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(x)))


class TwoTables(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(50, 8), nn.Embedding(60, 8, **options)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (x > 0).long()
        return self.head(self.one(places[:, 0]) + self.two(places[:, 1:3]).sum(1))


class ProductOfWeights(nn.Module):
    """The gradient of ``left`` is a product of which one factor is ``right``, transposed."""

    def __init__(self, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.rand(40, 30)), nn.Parameter(torch.rand(30, 3))
        self.multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.multiply(self.left, self.right)


def outlined(model: nn.Module, num_devices: int = 2, rows: int = 8) -> Program:
    return run_up_to("outline-regions", captured_model(model, num_devices, rows, columns=40))


def factored(program: Program) -> list[str]:
    return [str(n.kwargs["variable"]) for graph in program.shard_graphs for n in targets(graph, *ops.FACTORED)]


def matrix_products(program: Program) -> int:
    bodies = [region.graph_module.graph for region in program.regions.values()]
    return sum(len(targets(body, aten.mm.default)) for body in bodies)


@pytest.mark.slow
def test_products_larger_than_their_factors_leave_their_region() -> None:
    before = outlined(TwoLayers())
    after = FactorGradients(min_elements=0).run(before)
    verify(before)
    verify(after, before=before)
    assert after.stage is Stage.OUTLINED
    assert factored(after) == ["wide.weight"]
    assert matrix_products(after) == matrix_products(before) - 1
    (product,) = targets(after.shard_graphs[0], ops.product)
    left, right = product.args
    assert [tuple(factor.meta["val"].shape) for factor in (left, right)] == [(30, 4), (4, 40)]
    assert (right.op, right.target) == ("placeholder", "x")  # not given to the region only to be given back
    assert outputs(after.shard_graphs[0])["gradients"]["wide.weight"] is product


@pytest.mark.slow
def test_a_region_is_not_given_what_only_its_product_needed() -> None:
    after = FactorGradients(min_elements=0).run(outlined(TwoLayers()))
    for call in targets(after.shard_graphs[0], ops.call_region):
        body = after.regions[str(call.kwargs["region"])].graph_module.graph
        placeholders = [node for node in body.nodes if node.op == "placeholder"]
        assert len(placeholders) == len(call.args) and all(placeholder.users for placeholder in placeholders)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 9])
def test_uneven_shards_agree_on_what_is_factored(rows: int) -> None:
    after = FactorGradients(min_elements=0).run(outlined(TwoLayers(), rows=rows))
    assert len(after.shard_graphs) == 2
    assert factored(after) == ["wide.weight"] * 2
    verify(after)


@pytest.mark.slow
def test_a_gradient_that_is_worth_it_on_one_shard_alone_is_not_factored() -> None:
    """40 x 30 elements; the factors have 70 for each row: 17 rows are fewer, 18 are not."""
    assert factored(FactorGradients(min_elements=0).run(outlined(TwoLayers(), rows=34))) == ["wide.weight"]
    assert factored(FactorGradients(min_elements=0).run(outlined(TwoLayers(), rows=35))) == []


def test_one_device_has_nothing_to_share() -> None:
    program = outlined(TwoLayers(), num_devices=1)
    after = FactorGradients(min_elements=0).run(program)
    assert after.shard_graphs == program.shard_graphs and after.regions is program.regions
    assert after.remarks[-1].text == (
        "no gradient stays factors: 2 of which one device writes every element in any case, 2 neither a product of two "
        "matrices nor a table's"
    )


@pytest.mark.slow
def test_on_one_device_tables_stay_factors_alone() -> None:
    """Their rows are added to memory that is zero already; a product would be written whole in either place."""
    before = outlined(TwoTables(padding_idx=1), num_devices=1, rows=4)
    after = FactorGradients(min_elements=0).run(before)
    verify(after, before=before)
    assert factored(after) == ["two.weight", "one.weight"]
    assert "so that only what this step or the last one adds to is written" in after.remarks[-1].text


@pytest.mark.parametrize(
    "multiply",
    [
        torch.mm,
        lambda left, right: F.linear(left, right.t()),  # forward gives the transposed to backward
        lambda left, right: left @ right[:, :].reshape(30, 3),
        lambda left, right: left @ right.chunk(1)[0],
        lambda left, right: left @ right.view(30, 3, 1).unbind(2)[0],
    ],
    ids=["mm", "linear", "slice", "chunk", "unbind"],
)
def test_a_variable_is_no_factor(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    program = outlined(ProductOfWeights(multiply))
    after = FactorGradients(min_elements=0).run(program)
    verify(after, before=program)
    assert factored(after) == []


def test_a_copy_of_a_variable_may_be_a_factor() -> None:
    program = outlined(ProductOfWeights(lambda left, right: left @ right.clone().detach()))
    after = FactorGradients(min_elements=0).run(program)
    verify(after, before=program)
    assert factored(after) == ["left"]


def slice_of(program: Program, weight: fx.Node) -> fx.Node:
    return insert(program, weight.next, aten.slice.Tensor, (weight, 0, 0, 4))


def part_of(program: Program, weight: fx.Node) -> fx.Node:
    split = insert(program, weight.next, aten.split.Tensor, (weight, 4))
    return insert(program, split.next, operator.getitem, (split, 0))


def undeclared_view_of(program: Program, weight: fx.Node) -> fx.Node:
    part = slice_of(program, weight)
    return insert(program, part.next, aten._unsafe_view.default, (part, [4, 40]))


@pytest.mark.parametrize("view", [slice_of, part_of, undeclared_view_of])
def test_the_verifier_refuses_a_view_of_a_variable_as_a_factor(view: Callable[[Program, fx.Node], fx.Node]) -> None:
    program = FactorGradients(min_elements=0).run(outlined(TwoLayers()))
    graph = program.shard_graphs[0]
    (product,) = targets(graph, ops.product)
    wide = next(node for node in targets(graph, ops.read) if node.kwargs["variable"] == "wide.weight")
    product.args = (product.args[0], view(program, wide))
    with pytest.raises(VerifyError, match=r"(?s)factors_are_not_variables .* which is the variable wide.weight itself"):
        verify(program)


def test_a_program_without_buckets_is_refused() -> None:
    with pytest.raises(PassError, match="run 'plan-buckets' before it"):
        FactorGradients(min_elements=0).run(run_up_to("outline-regions", handmade()).evolve(buckets=()))


def test_packed_gradients_are_of_their_products_variables() -> None:
    program = run_passes(captured_model(TwoLayers(), 2, 8, columns=40), default_pipeline(min_factored_elements=0))
    graphs = [module.graph for module in program.device_graphs.values()]
    assert [len(targets(graph, ops.product)) for graph in graphs] == [1, 1]
    verify(program)
    node: fx.Node = targets(graphs[0], ops.product)[0]
    node.kwargs = {**node.kwargs, "variable": "narrow.weight"}
    with pytest.raises(VerifyError):
        verify(program)


def test_small_gradients_are_left_as_they_are() -> None:
    program = outlined(TwoLayers())
    assert factored(FactorGradients(min_elements=1200).run(program)) == ["wide.weight"]
    assert factored(FactorGradients(min_elements=1201).run(program)) == []


def test_what_one_device_alone_makes_whole_is_refused() -> None:
    """It would wait with a bucket of whole gradients for another's of factors."""
    program = run_passes(captured_model(TwoLayers(), 2, 8, columns=40), default_pipeline(min_factored_elements=0))
    graph = program.device_graphs["cpu:1"].graph
    product = targets(graph, ops.product)[0]
    with graph.inserting_after(product):
        copy = graph.call_function(aten.clone.default, (product,))
    copy.meta["val"] = product.meta["val"]
    targets(graph, ops.pack)[0].replace_input_with(product, copy)
    with pytest.raises(VerifyError, match=r"(?s)replicas_factor_the_same_gradients .* on one of cpu:0 and cpu:1 alone"):
        verify(program)


def test_gradients_of_tables_are_left_as_rows_and_indices() -> None:
    before = outlined(TwoTables(padding_idx=1))
    after = FactorGradients(min_elements=0).run(before)
    verify(after, before=before)
    assert sorted(factored(after)) == ["one.weight", "two.weight"]
    one, two = sorted(targets(after.shard_graphs[0], ops.index_add), key=lambda node: str(node.kwargs["variable"]))
    assert [tuple(factor.meta["val"].shape) for factor in one.args] == [(4, 8), (4,)]
    assert [tuple(factor.meta["val"].shape) for factor in two.args] == [(4, 2, 8), (4, 2)]
    assert ("padding_idx" not in one.kwargs, two.kwargs["padding_idx"]) == (True, 1)
    left = [
        node
        for region in after.regions.values()
        for node in targets(region.graph_module.graph, aten.embedding_dense_backward.default)
    ]
    assert left == []


def test_a_tables_gradient_that_is_scaled_by_counts_is_made_whole() -> None:
    """The counts are those of a replica's own batch."""
    assert factored(FactorGradients(min_elements=0).run(outlined(TwoTables(scale_grad_by_freq=True)))) == ["one.weight"]


def test_a_tied_table_is_made_whole() -> None:
    class Tied(TwoTables):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.one.weight.sum()

    assert factored(FactorGradients(min_elements=0).run(outlined(Tied()))) == ["two.weight"]


def test_regions_that_are_left_with_nothing_to_do_are_not_called() -> None:
    """One bucket for each table, so that backward is cut between them; the last only adds up rows."""
    caps = {"buckets": ByBytes(1e-6, 1e-6)}
    program = run_up_to("outline-regions", captured_model(TwoTables(), 2, 8, columns=40), **caps)
    after = FactorGradients(min_elements=0).run(program)
    verify(after, before=program)
    calls = targets(after.shard_graphs[0], ops.call_region)
    assert len(calls) < len(targets(program.shard_graphs[0], ops.call_region))
    assert all(call.users for call in calls)
    assert {str(call.kwargs["region"]) for call in calls} == set(after.regions)


@pytest.mark.slow
def test_a_table_is_printed_saved_and_checked(tmp_path: Path) -> None:
    pipeline = default_pipeline(min_factored_elements=0)
    program = run_passes(captured_model(TwoTables(padding_idx=1), 2, 8, columns=40), pipeline)
    (line,) = [line for line in str(program).splitlines() if line.lstrip().startswith("d(two.weight)")]
    assert (
        "# index_add(f32[4, 2, 8], i64[4, 2]), made by shares" in line
        and " = index_add(bucket=0, " in line
        and "padding_idx=1)" in line
    )
    program.save(tmp_path / "step.mirror")
    assert str(Program.load(tmp_path / "step.mirror")) == str(program)
    node = targets(program.device_graphs["cpu:0"].graph, ops.index_add)[0]
    node.args = (node.args[1], node.args[0])
    with pytest.raises(VerifyError, match=r"needs rows of float32.*, and as many integers that name their places"):
        verify(program)


def test_another_padding_is_another_gradient() -> None:
    before = outlined(TwoTables(padding_idx=1))
    after = FactorGradients(min_elements=0).run(before)
    for graph in after.shard_graphs:
        for node in targets(graph, ops.index_add):
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "padding_idx"}
    with pytest.raises(VerifyError, match=r"two\.weight"):
        verify(after, before=before)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"link": "copy"}, "over the link copy, no device reads the others' factors in their memory"),
        (
            {"parameters_are_shared": False},
            "no pass shares parameters, so that each device needs the whole gradient",
        ),
    ],
    ids=str,
)
def test_no_gradient_stays_factors_if_no_device_would_make_a_share(options: dict[str, Any], why: str) -> None:
    before = outlined(TwoLayers())
    after = run_passes(before, [FactorGradients(min_elements=0, **options)])
    assert factored(after) == [] and after.regions == before.regions
    said = [remark.text for remark in after.remarks if remark.by == "factor-gradients"]
    assert said == [f"no gradient stays factors: {why}"], "and nothing of changed bits"
    assert factored(run_passes(before, [FactorGradients(min_elements=0, link="shared-memory")]))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_tables_are_exchanged_whole_and_products_where_devices_make_shares(num_devices: int) -> None:
    """Other workers add rows that were not looked up here, and one device makes no shares that it could exchange."""
    model = TwoTables()
    model.head = nn.Linear(8, 60)
    program = outlined(model, num_devices).evolve(workers=World(2, num_devices).worker(0))
    after = FactorGradients(min_elements=1).run(program)
    assert factored(after) == (["head.weight"] if num_devices == 2 else [])
    why = {
        1: "one device has no share to make, and workers exchange whole buckets",
        2: "2 of tables, in which other workers have looked up other rows",
    }
    assert why[num_devices] in after.remarks[-1].text


def test_a_link_counts_by_what_carries_its_shares() -> None:
    register_link(Link("half", carries=(ops.all_reduce,), falls_back_to="shared-memory"))
    try:
        assert factored(FactorGradients(min_elements=0, link="half").run(outlined(TwoLayers()))) != []
    finally:
        unregister_link("half")
    with pytest.raises(ValueError, match="link is 'half': give one of"):
        FactorGradients(link="half")


def test_the_pipeline_tells_whether_parameters_are_shared() -> None:
    pipeline = default_pipeline(link="copy")
    assert resolve_sharing(pipeline) == pipeline and FactorGradients(link="copy") in pipeline
    without = [p for p in pipeline if p.name != "share-parameters"]
    assert FactorGradients(link="copy", parameters_are_shared=False) in resolve_sharing(without)
    asked = [FactorGradients(parameters_are_shared=True)]
    assert resolve_sharing(asked) == asked


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"link": "copy"}, {"disable": ["share-parameters"]}], ids=str)
def test_a_step_whose_devices_make_no_shares_does_not_say_that_they_do(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 3))
    x, y = torch.randn(4, 400), torch.zeros(4, dtype=torch.int64)
    options = {"exchange": "dense", **options}
    with sgd_step(model, 2, loss_fn=F.cross_entropy, **options) as step:
        program = step.prepare(x, target=y)
    said = [remark.text for remark in program.remarks if remark.by == "factor-gradients"]
    assert len(said) == 1 and said[0].startswith("no gradient stays factors: ")
    assert not any(targets(module.graph, *ops.FACTORED) for module in program.device_graphs.values())
