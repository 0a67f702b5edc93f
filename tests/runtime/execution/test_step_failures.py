"""What is advised after a failure of a step is what the user can still do, and what is said to have changed may have changed."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from asserting import Asserting
from tiny_programs import captured_model, handmade, sgd_step
from torch import fx, nn

import mirrorc
from mirrorc import ExecutionError
from mirrorc.ir.program import Accumulation, Program
from mirrorc.runtime.codegen.regions import Backend, RegionFunction, register_backend, unregister_backend
from mirrorc.runtime.execution.step_failures import explain_failure, note_if_torn


class Opaque(Backend):
    name = "opaque"

    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        def run(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            given = list(arguments)
            arguments.clear()
            return tuple(fx.Interpreter(graph_module).run(*given))

        return run


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


@pytest.fixture
def opaque() -> Iterator[str]:
    register_backend(Opaque())
    yield Opaque.name
    unregister_backend(Opaque.name)


def advice(backend: str, model: nn.Module, bad: torch.Tensor) -> str:
    with sgd_step(model, loss_fn=F.mse_loss, backend=backend) as step, pytest.raises(ExecutionError) as failed:
        step(bad, target=torch.zeros(4, 3))
    return str(failed.value).partition("  now:  No parameter was changed\n  fix:  ")[2]


def test_the_eager_backend_is_recommended_where_it_says_more(opaque: str) -> None:
    index, nothing = torch.tensor([0, 1, 2, 9]), torch.full((4, 4), float("nan"))
    plain = "check the batch of this call and that line"
    assert advice("eager", Table(), index) == plain
    assert advice("eager", Asserting(), nothing) == advice(opaque, Asserting(), nothing) == plain
    hint = "compiler=mirrorc.Compiler(backend='eager'), which names the operator exactly"
    assert advice(opaque, Table(), index) == f"check the batch of this call\n  or:   {hint}"


def test_after_a_failed_update_the_hyperparameters_are_to_be_checked_and_not_the_batch() -> None:
    model = nn.Linear(3, 3)
    optimizer, eager = torch.optim.AdamW(model.parameters()), mirrorc.Compiler(backend="eager")
    with mirrorc.compile(model, 1, optimizer=optimizer, loss_fn=F.mse_loss, compiler=eager) as step:
        optimizer.param_groups[0]["betas"] = (0.9,)
        with pytest.raises(
            ExecutionError, match=r"MC5001: .* in update raised(.*\n)*  fix:  print\(optimizer.param_groups\)"
        ):
            step(torch.ones(4, 3), torch.zeros(4, 3))


def accumulating(buffer: bool) -> Program:
    return handmade(2, buffer=buffer).evolve(accumulation=Accumulation.ADDS)


def evaluating(*more: nn.Module) -> Program:
    return captured_model(nn.Sequential(nn.Linear(4, 3), *more), evaluates=True)


BUFFERS = "buffers that forward writes may have been written in part"
KEPT = "the gradients that step.accumulate() has kept may be incomplete: drop them with step.zero_grad()"


def test_what_a_call_may_have_written_behind_its_commit_is_said_of_its_kind() -> None:
    for program, said in (
        (handmade(2), "Parameters and the optimizer's state may have been updated in part, so load a checkpoint"),
        (accumulating(False), f"No parameter was changed, but {KEPT}"),
        (accumulating(True), f"No parameter was changed, but {KEPT}; {BUFFERS}"),
        (evaluating(), "It writes nothing: nothing was changed"),
        (evaluating(nn.BatchNorm1d(3)), f"No parameter was changed, but {BUFFERS}"),
    ):
        failures = {0: MemoryError("no memory")}
        assert f"MemoryError: no memory\n  now:  The update had begun. {said}\n  fix:  check" in str(
            explain_failure(program, failures, has_committed=True)
        )
        assert "no memory\n  now:  No parameter was changed\n  fix:  check" in str(
            explain_failure(program, failures, has_committed=False)
        )
        interrupt = KeyboardInterrupt()
        note_if_torn(interrupt, program, has_committed=True)
        assert interrupt.__notes__[0].startswith(f"mirrorc's call was interrupted when the update had begun: {said}")
