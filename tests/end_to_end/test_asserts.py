"""What a forward asserts about tensors stops the step, with the user's words, before anything has changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asserting import TEXT, Asserting
from references import assert_same_model, unchanged
from torch import nn
from twins import Twins, compiled_step

from mirrorc import CaptureError, ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.packing import ByBytes

BUCKETS = {"buckets": ByBytes(0.01, 0.001)}


def asserting_twins(model: nn.Module, devices: int = 2, **options: Any) -> Twins:
    return Twins(model.double(), partial(torch.optim.AdamW, lr=0.01), F.mse_loss, devices, **BUCKETS | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"disable": ("share-parameters",)}),
        (2, {"link": "copy", "disable": ("share-parameters",)}),
        (2, {"backend": "inductor"}),
    ],
    ids=["one", "shared", "mirrored", "copy", "inductor"],
)
def test_a_failed_assert_raises_with_its_line_and_changes_nothing(devices: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with asserting_twins(Asserting(), devices, **options) as pair:
        model = pair.model
        for place, value in ((0, float("nan")), (5, float("inf")), (5, None)):
            pair.step(x, target=target)
            if devices == 1:
                pair.plain(x, target=target)
            bad = x.clone()
            bad[place] = 1e30 if value is None else value
            with unchanged(model, pair.optimizer), pytest.raises(ExecutionError) as failed:
                if value is None:  # BatchNorm would make it small
                    model.eval()
                pair.step(bad, target=target)
            model.train()
            told = str(failed.value)
            assert "asserting.py:" in told and "No parameter was changed" in told
            assert isinstance(failed.value.__cause__, AssertionError)
            assert (
                (TEXT in told and "torch.isfinite(x).all()" in told) if value is not None else "assertion error" in told
            )
        if devices == 1:
            assert_same_model(model, pair.twin, 1e-10)


def test_checks_of_torch_are_asserts() -> None:
    """Models of Hugging Face check their arguments so, and torch reads a number for it in plain PyTorch."""

    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check_tensor_all(x > -5.0, lambda: "too small")
            return self.layer(x)

    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with asserting_twins(Checks()) as pair:
        pair.train(x, target=target)
        bad = x.clone()
        bad[5] = -6.0
        refused = pytest.raises(ExecutionError, match="not all elements are true")
        with unchanged(pair.model, pair.optimizer), refused:
            pair.step(bad, target=target)
        pair.check()


@pytest.mark.slow
def test_asserts_stay_in_the_program_before_everything_that_leaves_the_replica() -> None:
    with compiled_step(Asserting(), F.mse_loss, **BUCKETS) as step:
        step.prepare(torch.ones(4, 4), target=torch.ones(4, 3))
        for graph in (module.graph for module in step.graphs.values()):
            checks = list(calls_to(graph, ops.check))
            assert [check.kwargs["text"] for check in checks] == [TEXT, "assertion error", "assertion error"]
            assert max(checks) < min(node for node in graph.nodes if node.target in ops.LAUNCHES)
        text = str(step.programs[-1])
        assert f"# or the step stops: {TEXT!r}" in text


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
        (
            torch.ops.mirrorc_tests.note,
            ("mirrorc_tests.note", "test_asserts.py:", "call it in your loop, between calls"),
        ),
    ],
    ids=["backward", "effect"],
)
def test_other_effects_are_refused(function: Any, words: tuple[str, ...]) -> None:
    model = Calls(function)
    with compiled_step(model, F.mse_loss) as step, unchanged(model), pytest.raises(CaptureError) as refused:
        step(torch.ones(4, 4), target=torch.ones(4, 3))
    assert all(word in str(refused.value) for word in words), str(refused.value)
