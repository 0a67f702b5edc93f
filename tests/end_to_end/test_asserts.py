"""What a forward asserts about tensors stops the step, with the user's words, before anything has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asserting import TEXT, Asserting
from references import assert_same_model, train_step, unchanged
from selections import slow
from torch import nn

import mirrorc
from mirrorc import CaptureError, ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.printing.reader import read_program_text


def compiled(model: nn.Module, devices: int, **options: Any) -> tuple[mirrorc.Step, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"backend": "eager", "first_bucket_mb": 0.001, "bucket_cap_mb": 0.01} | options
    return mirrorc.compile(model, devices, optimizer=optimizer, loss_fn=F.mse_loss, **options), optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {}),
        *slow((3, {"disable_passes": ("share-parameters",)})),
        *slow((2, {"link": "copy", "disable_passes": ("share-parameters",)}), (2, {"backend": "inductor"})),
    ],
    ids=["one", "shared", "mirrored", "copy", "inductor"],
)
def test_a_failed_assert_raises_with_its_line_and_changes_nothing(devices: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Asserting().double()
    twin = copy.deepcopy(model)
    step, optimizer = compiled(model, devices, **options)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with step:
        for place, value in ((0, float("nan")), (5, float("inf")), (5, None)):
            step(x, target=target)
            if devices == 1:
                train_step(twin, twin_optimizer, {"x": x, "target": target}, F.mse_loss)
            bad = x.clone()
            bad[place] = 1e30 if value is None else value
            with unchanged(model, optimizer), pytest.raises(ExecutionError) as failed:
                if value is None:  # BatchNorm would make it small
                    model.eval()
                step(bad, target=target)
            model.train()
            told = str(failed.value)
            assert "asserting.py:" in told and "No parameter was changed" in told
            assert isinstance(failed.value.__cause__, AssertionError)
            assert (
                (TEXT in told and "torch.isfinite(x).all()" in told) if value is not None else "assertion error" in told
            )
    if devices == 1:
        assert_same_model(model, twin, 1e-10)


def test_checks_of_torch_are_asserts() -> None:
    """Models of Hugging Face check their arguments so, and torch reads a number for it in plain PyTorch."""

    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check_tensor_all(x > -5.0, lambda: "too small")
            return self.layer(x)

    model = Checks().double()
    twin = copy.deepcopy(model)
    step, optimizer = compiled(model, 2)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with step:
        step(x, target=target)
        train_step(twin, twin_optimizer, {"x": x, "target": target}, F.mse_loss)
        bad = x.clone()
        bad[5] = -6.0
        with unchanged(model, optimizer), pytest.raises(ExecutionError, match="not all elements are true"):
            step(bad, target=target)
    assert_same_model(model, twin, 1e-10)


@pytest.mark.slow
def test_asserts_stay_in_the_program_before_everything_that_leaves_the_replica() -> None:
    step, _ = compiled(Asserting(), 2)
    with step:
        step.prepare(torch.ones(4, 4), target=torch.ones(4, 3))
        for graph in (module.graph for module in step.graphs.values()):
            checks = list(calls_to(graph, ops.check))
            assert [check.kwargs["text"] for check in checks] == [TEXT, "assertion error", "assertion error"]
            assert max(checks) < min(node for node in graph.nodes if node.target in ops.LAUNCHES)
        text = str(step.program)
        assert f"# or the step stops: {TEXT!r}" in text and read_program_text(text) is not None


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch._assert_async(torch.isfinite(gradient).all(), "a gradient")
        return gradient * 2


@torch.library.custom_op("mirrorc_tests::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    """Would write a log."""


note.register_fake(lambda x: None)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        done = self.function(y)
        return y if done is None else done


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y: InBackward.apply(y), ("asserts something in backward", "assert it in forward")),
        (torch.ops.mirrorc_tests.note, ("mirrorc_tests.note", "test_asserts.py:", "call it between steps")),
    ],
    ids=["backward", "effect"],
)
def test_other_effects_are_refused(function: Any, words: tuple[str, ...]) -> None:
    model = Calls(function)
    step, optimizer = compiled(model, 2)
    with step, unchanged(model, optimizer), pytest.raises(CaptureError) as refused:
        step(torch.ones(4, 4), target=torch.ones(4, 3))
    assert all(word in str(refused.value) for word in words), str(refused.value)
