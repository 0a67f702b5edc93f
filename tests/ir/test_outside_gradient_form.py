"""A form of gradient from outside of the package: recognized, verified, printed, saved, made by shares or whole, taken back."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from saved_programs import assert_same, reload
from selections import slow_but
from tiny_programs import captured_model, run_up_to, targets
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.ir.gradient_forms import Apply, FactoredGradient, GradientForm, register, unregister
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.operation import Kind, operation, withdraw
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.type_rules import noted_type, of_slot
from mirrorc.ir.value_types import ValueType, say_type
from mirrorc.passes import FactorGradients, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import add_passes
from mirrorc.runtime.state.shares.pieces import FactoredPiece, Factors, makes_shares_of
from mirrorc.verifier.verifier import Verify, VerifyError, verify

aten = torch.ops.aten


def of_row_sum(program: Program, node: fx.Node) -> ValueType:
    slot, (rows,) = of_slot(program, node), map(noted_type, node.args)
    if len(rows[1]) != 2 or rows[1][1:] != slot[1]:
        raise TypeError(f"it adds up the rows of {say_type(rows)}, but the slot is {say_type(slot)}")
    return slot


class RowSumForm(GradientForm):
    """The gradient [n] of a bias that is added to each row of a matrix: the sum of ``rows`` [m, n]. It need not pay."""

    factor_names = ("rows",)
    description = "a sum of rows"

    def recognize(self, gradient: fx.Node) -> FactoredGradient | None:
        total: Any = gradient.args[0] if gradient.target is aten.view.default else None
        is_sum = total is not None and total.target is aten.sum.dim_IntList and total.args[1:] == ([0], True)
        return FactoredGradient(self, (total.args[0],)) if is_sum and len(total.users) == 1 else None

    def make_whole(self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], **details: Any) -> Any:
        return apply(aten.view.default, apply(aten.sum.dim_IntList, factors[0], [0], True), list(shape))

    def expression(self, *factors: str) -> str:
        return f"row_sum({factors[0]})"

    def is_worth_it(self, gradient: torch.Tensor, factors: Sequence[torch.Tensor]) -> bool:
        return True


@dataclass
class RowSumPiece(FactoredPiece):
    columns: slice = field(default_factory=lambda: slice(None))

    @classmethod
    def cut(cls, slot: Slot, factored: int, first: int, last: int, **details: Any) -> Iterator[Self]:
        yield cls(first, last, factored, slice(first - slot.offset, last - slot.offset))

    def add_up(self, factors: Sequence[Factors], total: torch.Tensor) -> None:
        torch.sum(torch.cat([rows[:, self.columns] for (rows,) in factors]), 0, out=total)


Symbol = Callable[..., Any]


@pytest.fixture
def row_sum() -> Iterator[Symbol]:
    @operation(Kind.FACTORED, since=Stage.OUTLINED, gives=of_row_sum, stem="d_{variable}", hidden=("variable",))
    def row_sum(rows: Any, *, bucket: int, variable: str, replica: int | None = None) -> Any:
        pass

    form = RowSumForm(row_sum)
    register(form)
    makes_shares_of(row_sum)(RowSumPiece)
    yield row_sum
    unregister(form)
    withdraw(row_sum)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 37, bias=False), nn.Parameter(torch.zeros(37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


def compiled(**options: Any) -> Program:
    return run_passes(captured_model(Shifted(), **options), default_pipeline(min_factored_elements=0), [Verify()])


def factored(program: Program) -> set[str]:
    return {str(node.kwargs["variable"]) for graph in program.graphs() for node in calls_to(graph, *ops.FACTORED)}


def test_it_is_recognized_and_taken_back(row_sum: Symbol) -> None:
    outlined = run_up_to("outline-regions", captured_model(Shifted()))
    after = FactorGradients(min_elements=0).run(outlined)
    verify(after, before=outlined)
    (node,) = targets(after.shard_graphs[0], row_sum)
    assert node.kwargs["variable"] == "shift" and [tuple(n.meta["val"].shape) for n in node.all_input_nodes] == [
        (4, 37)
    ]
    bodies = [region.graph_module.graph for region in after.regions.values()]
    assert not any(
        n.target is aten.sum.dim_IntList and n.args[1:] == ([0], True) for body in bodies for n in body.nodes
    )


def test_after_it_is_taken_back_its_gradients_stay_whole() -> None:
    outlined = run_up_to("outline-regions", captured_model(Shifted()))
    assert "shift" not in factored(FactorGradients(min_elements=0).run(outlined))


def test_gradients_of_microbatches_are_whole_if_its_operation_takes_the_factors_of_one(row_sum: Symbol) -> None:
    captured = captured_model(Shifted(), rows=4, microbatches=2)
    program = run_passes(captured, default_pipeline(min_factored_elements=0, microbatches=2), [Verify()])
    assert factored(program) == {"linear.weight"}
    assert "a sum of rows that is made of the factors of one microbatch alone" in str(program.remarks)


def test_it_is_printed_and_saved(row_sum: Symbol, tmp_path: Path) -> None:
    program = compiled()
    assert "shift" in factored(program) and "row_sum(" in program.to_text()
    assert "= row_sum(" in program.to_text()
    assert_same(reload(program, tmp_path), program)


@pytest.mark.slow
def test_the_verifier_knows_it(row_sum: Symbol) -> None:
    program = compiled()
    node = targets(program.device_graphs["cpu:1"].graph, row_sum)[0]
    node.args = (next(n for n in node.graph.nodes if n.op == "placeholder"),)
    with pytest.raises(VerifyError, match=r"it adds up the rows of float32\[4, 4\], but the slot is float32\[37\]"):
        verify(program)
    outlined = run_up_to("outline-regions", captured_model(Shifted()))
    after = FactorGradients(min_elements=0).run(outlined)
    graph = after.shard_graphs[0]
    node = targets(graph, row_sum)[0]
    with graph.inserting_before(node):
        other = graph.call_function(aten.neg.default, (node.args[0],))
    other.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]
    node.args = (other,)
    with pytest.raises(VerifyError, match="the gradient of shift on cpu:0 is computed in another way"):
        verify(after, before=outlined)


@dataclass(frozen=True)
class ClipGradients:
    """Puts an operator between the factored gradients and their packs, so that nothing is left to shares."""

    operation: Symbol
    changes_dataflow: bool = True
    name: str = field(default="clip-gradients", init=False)
    input_stage: Stage = field(default=Stage.PACKED, init=False)
    output_stage: Stage = field(default=Stage.PACKED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        for node in list(calls_to(program.mirrored_graph, self.operation)):
            (pack,) = node.users
            pack.replace_input_with(node, insert(program, pack, aten.clamp.default, (node, -1e6, 1e6)))
        return program


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", slow_but([3], [2, 3]))
@pytest.mark.parametrize("way", ["shares", "pack", "at once"])
def test_it_runs(row_sum: Symbol, num_devices: int, way: str) -> None:
    """By shares; whole, in each replica's bucket; or whole, for an operator of a user's pass. As on one device."""
    torch.manual_seed(0)
    model = Shifted().double()
    batches = [(torch.randn(n, 4).double(), torch.randint(37, (n,))) for n in (8, 7, 9)]
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    for x, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(alone(x), target).backward()
        optimizer.step()
    passes = default_pipeline(min_factored_elements=0)
    if way == "pack":
        asked = FactorGradients(min_elements=0, parameters_are_shared=True)
        passes = [asked if one.name == asked.name else one for one in passes if one.name != "share-parameters"]
    if way == "at once":
        passes = add_passes(passes, [mirrorc.after("pack-gradients", ClipGradients(row_sum))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with mirrorc.compile(
        model,
        num_devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend="eager", passes=passes),
    ) as step:
        for x, target in batches:
            step(x, target=target)
        assert "row_sum(" in step.program.to_text() and step.memory().total > 0
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_form_without_a_class_that_makes_shares_is_refused(row_sum: Symbol) -> None:
    makes_shares_of.forget(row_sum)
    model = Shifted()
    step = mirrorc.compile(
        model,
        2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend="eager", passes=default_pipeline(min_factored_elements=0)),
    )
    with step, pytest.raises(LookupError, match=r"nothing is registered to make shares of the gradients of .* row_sum"):
        step(torch.randn(8, 4), target=torch.randint(37, (8,)))


@pytest.mark.slow
def test_a_form_must_have_an_operation_of_its_own_that_gives_factors(row_sum: Symbol) -> None:
    with pytest.raises(
        ValueError, match="RowSumForm: the operation pack is not declared to give a gradient as factors"
    ):
        register(RowSumForm(ops.pack))
    with pytest.raises(ValueError, match="RowSumForm: the operation product is already that of ProductForm"):
        register(RowSumForm(ops.product))
