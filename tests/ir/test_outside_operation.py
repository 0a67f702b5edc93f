"""An operation that is declared outside of the package: verified, printed, saved, lowered, run, and taken back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_programs import assert_same, reload
from tiny_programs import captured_two_layers
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.comparison.diff import diff_programs
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.operation import Kind, operation, withdraw
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.type_rules import of_operand
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import add_passes
from mirrorc.printing.colors import colored
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.verifier.verifier import Verify, VerifyError, verify

Symbol = Callable[..., Any]


@pytest.fixture(scope="module")
def scale_bucket() -> Iterator[Symbol]:
    @operation(Kind.COMPUTE, since=Stage.PACKED, gives=of_operand)
    def scale_bucket(value: Any, *, factor: float, replica: int | None = None) -> Any:
        """Multiplies a bucket by a number."""

    @binds(scale_bucket)
    def bind(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        return lambda value, factor: value.mul_(factor)

    yield scale_bucket
    withdraw(scale_bucket)


@dataclass(frozen=True)
class ScaleBuckets:
    """Multiplies every bucket by a number before it is reduced, or every sum (share of a sum) before it is applied."""

    operation: Symbol
    factor: float = 0.5
    at: Symbol = ops.all_reduce
    changes_dataflow: bool = True
    name: str = field(default="scale-buckets", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        for node in list(calls_to(program.mirrored_graph, self.at)):
            node.args = tuple(
                insert(program, node, self.operation, (value,), {"factor": self.factor, "replica": replica_of(value)})
                for value in node.all_input_nodes
            )
        return program


def compiled(scale: Any, **options: Any) -> Program:
    pipeline = add_passes(default_pipeline(), [mirrorc.after("insert-update", scale)])
    return run_passes(captured_two_layers(**options), pipeline, [Verify()])


def test_it_is_printed_and_colored_and_compared(scale_bucket: Symbol) -> None:
    program = compiled(ScaleBuckets(scale_bucket))
    line = "b0_scale_bucket: f32[96]         = scale_bucket(b0, factor=0.5)"
    text = program.to_text()
    assert line in text and "= reduce_scatter(bucket=0, b0_scale_bucket, op=sum, link=shared-memory)" in text
    spans = {colored(line).plain[span.start : span.end] for span in colored(line).spans}
    assert "scale_bucket" in spans
    difference = diff_programs(program, compiled(ScaleBuckets(scale_bucket, factor=0.25)))
    assert "factor=0.25" in difference


def test_it_is_saved_and_loaded(scale_bucket: Symbol, tmp_path: Path) -> None:
    for at in (ops.all_reduce, ops.update):
        program = compiled(ScaleBuckets(scale_bucket, at=at))
        assert_same(reload(program, tmp_path), program)


@pytest.mark.slow
def test_the_verifier_knows_it(scale_bucket: Symbol) -> None:
    pipeline = add_passes(default_pipeline(), [mirrorc.after("insert-update", ScaleBuckets(scale_bucket))])
    for at in (ops.all_reduce, ops.update):
        silent = ScaleBuckets(scale_bucket, at=at, changes_dataflow=False)
        with pytest.raises(
            VerifyError, match=r"breaks the rule dataflow_is_preserved on passes\n  why:  the way to the .* of bucket 0"
        ):
            run_passes(captured_two_layers(), [silent if p.name == silent.name else p for p in pipeline], [Verify()])
    program = compiled(ScaleBuckets(scale_bucket))
    node = next(calls_to(next(iter(program.device_graphs.values())).graph, scale_bucket))
    node.kwargs = {}
    with pytest.raises(VerifyError, match=r"(?s)operations_have_their_arguments.*has no keyword factor"):
        verify(program)


def trained(add: list[Any], learning_rate: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    devices = ["cpu:0", "cpu:1"]
    with mirrorc.compile(
        model,
        devices=devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend="eager", add=add),
    ) as step:
        for _ in range(3):
            step(x, target=y)
        assert step.memory().devices
        if add:
            assert "scale_bucket" in step.program.to_text()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_it_runs(scale_bucket: Symbol) -> None:
    expected = trained([], learning_rate=0.05)
    for at in (ops.all_reduce, ops.update):
        scaled = trained([mirrorc.after("insert-update", ScaleBuckets(scale_bucket, at=at))], learning_rate=0.1)
        assert all(torch.equal(scaled[name], value) for name, value in expected.items())  # halving is exact
    withdrawn = ScaleBuckets(lambda value: value)
    with pytest.raises(mirrorc.errors.PassError, match="is no operation of mirrorc, nor an operator of torch"):
        trained([mirrorc.after("insert-update", withdrawn)], learning_rate=0.1)
