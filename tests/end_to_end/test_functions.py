"""A step of a function that computes the loss, in place of a model and a loss_fn."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.options.table import grouped

EAGER = mirrorc.Compiler(backend="eager")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, dtype=torch.float64, generator=generator), torch.arange(size) % 3


GLOBAL = net()


def loss_of_a_global(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(GLOBAL(x), y)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_function_trains_as_on_one_device(capture: str, devices: int) -> None:
    model, plain = net(), net()
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))

    def compute(model: nn.Module, x: torch.Tensor, y: torch.Tensor, scale: float) -> Any:
        logits = model(x) * scale
        accuracy = (logits.argmax(1) == y).double().mean()
        return F.cross_entropy(logits, y), {"accuracy": accuracy, "logits": logits}

    @mirrorc.train_step(model, optimizer, devices, compiler=mirrorc.Compiler(backend="eager", capture=capture))
    def step(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> Any:
        logits = model(x) * scale
        accuracy = (logits.argmax(1) == y).double().mean()
        return F.cross_entropy(logits, y), {"accuracy": accuracy, "logits": logits}

    with step:
        for size, scale in ((7, 1.0), (7, 1.0), (6, 0.5)):
            x, y = batch(size)
            loss, metrics = step(x, y, scale=scale)
            expected, expected_metrics = compute(plain, x, y, scale)
            own.zero_grad()
            expected.backward()
            own.step()
            torch.testing.assert_close(torch.as_tensor(loss.item()), expected.detach().float(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(metrics["logits"], expected_metrics["logits"].detach(), rtol=1e-12, atol=1e-12)
            assert metrics["accuracy"] == pytest.approx(expected_metrics["accuracy"].item())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        found, _ = step.evaluate(*batch())
        assert found.item() == pytest.approx(compute(plain, *batch(), 1.0)[0].item())
        assert next(iter(step.program.variables)) == "model.0.weight"


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_a_module_in_a_global_is_that_of_the_device(capture: str) -> None:
    optimizer = torch.optim.SGD(GLOBAL.parameters(), lr=0.1)
    compiler = mirrorc.Compiler(backend="eager", capture=capture)
    with mirrorc.compile(loss_of_a_global, 2, modules=GLOBAL, optimizer=optimizer, compiler=compiler) as step:
        first, *others = [step(*batch()).item() for _ in range(3)]
        assert all(later < first for later in others)
        assert next(iter(step.program.variables)) == "GLOBAL.0.weight"


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize("shape", [dict, Result, tuple])
def test_a_step_returns_what_the_function_returns(shape: Any) -> None:
    model = net()

    def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        return (loss, logits) if shape is tuple else shape(loss=loss, logits=logits)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mirrorc.compile(compute, 2, modules=[model], optimizer=optimizer, compiler=EAGER) as step:
        for found in (step(*batch()), step.evaluate(*batch())):
            assert type(found) is shape
            loss, logits = found if shape is tuple else (found if shape is dict else vars(found)).values()
            assert loss.shape == () and logits.shape == (7, 3) and not logits.requires_grad


def test_two_networks_and_a_penalty() -> None:
    critic, actor = net(), net()
    both = [*critic.parameters(), *actor.parameters()]

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(actor(x) + critic(x.flip(1)), y) + 0.1 * actor(x).square().mean()

    plain = copy.deepcopy([critic, actor])
    with mirrorc.compile(
        compute, 2, modules=[critic, actor], optimizer=torch.optim.SGD(both, lr=0.1), compiler=EAGER
    ) as step:
        x, y = batch(6)
        found = step(x, y)
        expected = F.cross_entropy(plain[1](x) + plain[0](x.flip(1)), y) + 0.1 * plain[1](x).square().mean()
        assert found.item() == pytest.approx(expected.item(), rel=1e-9)
        assert {name.split(".")[0] for name in step.program.variables} == {"critic", "actor"}


def test_calls_that_make_no_step_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (lambda x: x, {}, TypeError, r"mirrorc\.compile\(loss_of, modules="),
        (lambda x: x, {"modules": []}, TypeError, r"modules is \[\]\n  fix:  give the modules that the function calls"),
        (lambda x: x, {"modules": [3]}, TypeError, r"modules is \[3\]\n  fix:  give the modules"),
        (model, {"modules": [model]}, ValueError, "cannot be used with a model"),
        (
            nn.Linear,
            {"modules": [model]},
            TypeError,
            r"model is a type, neither a module nor a function\n  fix:  mirrorc\.compile\(net",
        ),
        (
            lambda x: x,
            {"modules": model, "loss_fn": F.mse_loss},
            ValueError,
            "loss_fn= cannot be used with a function in place of the model",
        ),
        (
            lambda x: x,
            {"modules": model, "return_outputs": True},
            ValueError,
            "return_outputs= cannot be used with a function",
        ),
    ]
    for function, options, error, message in cases:
        with pytest.raises(error, match=message):
            mirrorc.compile(function, 2, **grouped({"optimizer": optimizer, "backend": "eager", **options}))


COUNT = 0


def counting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return F.cross_entropy(GLOBAL(x), y)


def test_a_function_that_assigns_a_global_is_not_trained_silently_without_it() -> None:
    optimizer = torch.optim.SGD(GLOBAL.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(),
        mirrorc.compile(counting, 2, modules=GLOBAL, optimizer=optimizer, compiler=EAGER) as step,
        pytest.raises(mirrorc.CaptureError),
    ):
        warnings.simplefilter("ignore")
        step(*batch())
