"""A step's state is whole again after anything that goes wrong on the way to a step, or between its beginning and its end."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import Interrupter, fail, interrupt, python_handles_interrupts
from lockstep import Lockstep
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.options.table import grouped
from mirrorc.passes import default_pipeline
from mirrorc.runtime.execution import executor
from mirrorc.runtime.state.optimizers import bucket_optimizers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.a * self.b).pow(2).mean()


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[None] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return interrupted


def test_a_buffer_that_was_replaced_before_a_refused_call_is_used_by_the_next_one() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(8, 4)
    with sgd_step(model, 2, lr=0.0) as step:
        step(x)
        model.a.data, kept = torch.full((4,), 3.0), model.b.data
        model.b.data = torch.ones(1)
        with pytest.raises(ValueError, match="the model's 'b' was"):
            step(x)
        model.b.data = kept
        torch.testing.assert_close(step(x), model(x).detach())


@pytest.mark.slow
def test_an_interrupt_while_memory_is_laid_out_does_not_break_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64))
    batch = {"input": torch.randn(8, 4), "target": torch.randn(8, 64)}
    with sgd_step(model, 2, loss_fn=F.mse_loss) as step:
        with monkeypatch.context() as patch:
            patch.setattr(bucket_optimizers, "FlatOptimizer", once(bucket_optimizers.FlatOptimizer))
            with pytest.raises(KeyboardInterrupt):
                step(**batch)
        losses = [step(**batch).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] != losses[-1]


@pytest.mark.slow
def test_gradients_of_tables_are_right_after_an_interrupt_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(is_interrupted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4096, 64), nn.Flatten(), nn.LazyLinear(2))
        short, long = (torch.randint(4096, (n, 2)) for n in (8, 12))
        model(short)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"passes": default_pipeline(min_factored_elements=0), "backend": "eager", "loss_fn": F.cross_entropy}
        with mirrorc.compile(model, 2, optimizer=optimizer, **grouped(options)) as step:  # type: ignore[arg-type]
            for x in (short, long):
                step(x, target=torch.zeros(len(x), dtype=torch.int64))
            if is_interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr(executor, "forget_writes", once(executor.forget_writes))
                    with pytest.raises(KeyboardInterrupt):
                        step(short, target=torch.zeros(len(short), dtype=torch.int64))
            for _ in range(2):
                step(short, target=torch.zeros(len(short), dtype=torch.int64))
        return model[0].weight.detach().clone()

    torch.testing.assert_close(trained(True), trained(False), rtol=0.0, atol=0.0)


class NoText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_hyperparameters_are_told_without_asking_them_for_a_text() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0].update(note=NoText(), table=torch.zeros(100), pair=(1, [2.0]), one=(3,))
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=F.mse_loss, compiler=mirrorc.Compiler(backend="eager")
    ) as step:
        step(torch.randn(8, 4), target=torch.randn(8, 4))
        text = str(step.program)
    assert "lr=0.5" in text
    assert re.search(r"note=NoText, table=a tensor \[100\] of [0-9a-f]{8}, pair=\(1, \[2\.0\]\), one=\(3,\)", text)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.slow
@pytest.mark.parametrize("how", [interrupt, pytest.param(fail, marks=pytest.mark.slow)], ids=["interrupt", "failure"])
@pytest.mark.parametrize(
    "stride",
    [pytest.param(13), pytest.param(1, marks=pytest.mark.exhaustive)],
    ids=["some places", "all places"],
)
def test_memory_is_laid_out_anew_completely_or_not_at_all(
    how: Any, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops, the model and the optimizer are as they were, and later steps train what they should."""

    def make() -> tuple[mirrorc.Step, nn.Module, torch.optim.Optimizer]:
        model = Normalized()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        step = mirrorc.compile(
            model, 2, optimizer=optimizer, loss_fn=F.cross_entropy, compiler=mirrorc.Compiler(backend="eager")
        )
        return step, model, optimizer

    torch.manual_seed(1)
    both = Lockstep(make, {"x": torch.randn(4, 4), "target": torch.tensor([0, 1, 2, 0])})
    trainings = (both.undisturbed, both.disturbed)

    def thaw(is_thawed: bool) -> None:
        for training in trainings:
            training.model.first.weight.requires_grad_(is_thawed)

    state, interrupter = both.disturbed.step._state, Interrupter(lambda filename: "runtime/state" in filename)
    prepare_for = state.prepare_for
    with python_handles_interrupts(), both.undisturbed.step, both.disturbed.step:
        for is_thawed in (True, False, True):
            thaw(is_thawed)
            both.go_on()
        place = num_stopped = 0
        while interrupter.where or place == 0:
            thaw(is_thawed := not is_thawed)
            with monkeypatch.context() as patch:
                there = functools.partial(
                    lambda at, *given, **how_stale: interrupter.interrupted(
                        lambda: prepare_for(*given, **how_stale), at, how
                    ),
                    place,
                )
                patch.setattr(state, "prepare_for", there)
                raised, has_trained = both.disturb()
            if how is fail:  # what repeating has cured is no failure
                assert (raised is None) == has_trained and (has_trained or interrupter.where)
            else:
                assert (raised is not None) == bool(interrupter.where) != has_trained
            num_stopped += not has_trained
            for training in trainings:  # what the user writes must be seen
                for tensor in (*training.model.parameters(), training.model.norm.running_mean):
                    tensor.data = tensor.data * 0.875
            both.go_on()
            place += stride
        assert num_stopped > 10
