"""The target of a loss: the last positional argument, or by its name."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirrorc
from mirrorc.capture.call.signature import Signature


class OneInput(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Masked(nn.Module):
    def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0) -> Any:
        return x


class Several(nn.Module):
    def forward(self, *xs: Any) -> Any:
        return xs


X, Y, Z = torch.zeros(4, 2), torch.ones(4), torch.full((4,), 2.0)


def paths(
    model: nn.Module, *args: Any, trains: bool = True, loss_fn: Callable[..., Any] | None = F.mse_loss, **kwargs: Any
) -> dict[str, float]:
    call, _ = Signature(model, loss_fn, 2).split(args, kwargs, trains=trains)
    return {leaf.path: float(leaf.tensor.max()) for leaf in call.leaves if leaf.tensor is not None}


def test_the_last_positional_argument_is_the_target() -> None:
    assert paths(OneInput(), X, Y) == paths(OneInput(), X, target=Y) == paths(OneInput(), x=X, target=Y)
    assert paths(OneInput(), Y, x=X) == {"x": 0.0, "target": 1.0}, "forward has its argument by name"
    assert paths(Masked(), X, Y) == {"x": 0.0, "target": 1.0}, "a training call needs a target"
    assert paths(Masked(), X, Z, Y) == {"x": 0.0, "mask": 2.0, "target": 1.0}
    assert paths(Masked(), X, Y, scale=2.0) == {"x": 0.0, "target": 1.0}
    assert paths(Several(), X, Z, Y)["target"] == 1.0
    assert paths(OneInput(), X, (Y, Z)).keys() == {"x", "target[0]", "target[1]"}


def test_an_evaluation_may_leave_it_out() -> None:
    assert paths(OneInput(), X, trains=False) == {"x": 0.0}
    assert paths(OneInput(), X, Y, trains=False) == {"x": 0.0, "target": 1.0}
    assert paths(Masked(), X, mask=Z, trains=False) == {"x": 0.0, "mask": 2.0}
    assert paths(Masked(), X, Z, target=Y, trains=False) == {"x": 0.0, "mask": 2.0, "target": 1.0}
    for model in (Masked(), Several()):
        with pytest.raises(
            TypeError,
            match=r"is the last argument the target, or one of .*\?\n.*\n  fix:  step\.evaluate\(x, target=y\)",
        ):
            paths(model, X, Y, trains=False)


def test_without_a_loss_function_all_arguments_are_the_models() -> None:
    assert paths(Masked(), X, Z, loss_fn=None) == {"x": 0.0, "mask": 2.0}
    with pytest.raises(TypeError, match="too many positional arguments"):
        paths(OneInput(), X, Y, loss_fn=None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X,), "(?s)target is missing: .* step\\(x, y\\)"),
        (((X, Y),), r"(?s)target is missing: .*  fix:  step\(\*batch\)\n"),
        (({"x": X, "target": Y},), r"(?s)target is missing: .*  fix:  step\(\*\*batch\)\n"),
        (({"x": X},), r"(?s)target is missing: .*  fix:  step\(x, y\)\n"),
        ((), "missing a required"),
        ((X, Y, Z), r"(?s)too many positional.*  fix:  step\(x, target=y\)"),
    ],
)
def test_calls_that_do_not_fit_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        paths(OneInput(), *args)


def test_a_model_that_takes_anything_has_an_input() -> None:
    class Named(nn.Module):
        def forward(self, input_ids: Any = None, mask: Any = None) -> Any:
            return input_ids

    for model in (Several(), Named()):
        assert len(paths(model, X, trains=False)) == 1
        with pytest.raises(TypeError, match="target is missing"):
            paths(model, X)
    assert paths(Named(), Y, input_ids=X) == {"input_ids": 0.0, "target": 1.0}


def test_a_forward_that_cannot_take_a_whole_batch_is_told_of_its_parts() -> None:
    batch = torch.ones(4, 3), torch.ones(4, 1)
    model = nn.Linear(3, 1)
    optimizer, eager = torch.optim.SGD(model.parameters(), lr=0.1), mirrorc.Compiler(backend="eager")
    with mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=F.mse_loss, compiler=eager) as step:
        for given, call in (
            (batch, "*batch"),
            (list(batch), "*batch"),
            (dict(zip("xy", batch, strict=True)), "**batch"),
        ):
            with pytest.raises(
                mirrorc.CaptureError, match=rf"MC2103: .*(\n.*)*\n  or:   step.evaluate\({re.escape(call)}\)"
            ):
                step.evaluate(given)
        with pytest.raises(mirrorc.CaptureError, match=r"MC2103") as raised:
            step.evaluate(torch.ones(4, 2))
    assert "batch)" not in str(raised.value)


def test_a_step_and_check_loss_take_it() -> None:
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    losses = []
    for call in (lambda step: step(x, y), lambda step: step(x, target=y)):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        with mirrorc.compile(
            model,
            2,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=F.mse_loss,
            compiler=mirrorc.Compiler(backend="eager"),
        ) as step:
            losses.append((call(step), step.evaluate(x, y), len(step.programs)))
            call(step), step(x, y), step.evaluate(x, target=y)
            assert len(step.programs) == 2, "one program, however the target is passed"
    assert losses[0] == losses[1]
    assert mirrorc.check_loss(model, x, y, loss_fn=F.mse_loss).same
