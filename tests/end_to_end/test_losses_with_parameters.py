"""A loss that is a function around a module whose parameters the optimizer has trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import selections
import torch
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc.errors import CaptureError


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def compute(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(output), target)


class Held:
    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.criterion.compute(output, target)


def applied(criterion: Criterion, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return criterion.compute(output, target)


Losses = Callable[[Criterion], Any]

WAYS: dict[str, Losses] = {
    "a method": lambda criterion: criterion.compute,
    "a closure": lambda criterion: lambda output, target: criterion.compute(output, target),
    "a partial": lambda criterion: partial(applied, criterion),
    "a partial of a method": lambda criterion: partial(criterion.compute),
}


def models() -> tuple[nn.Module, Criterion]:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double(), Criterion().double()


def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1, momentum=0.5)


@pytest.mark.parametrize("name", ["a method", *selections.slow(*((name,) for name in WAYS if name != "a method"))])
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("devices", [2, *selections.slow((1,), (3,))])
def test_parameters_of_a_loss_train_as_on_one_device(name: str, capture: str, devices: int) -> None:
    model, criterion = models()
    twin, other = copy.deepcopy((model, criterion))
    reference = optimizer(twin, other)
    with compiled_step(model, WAYS[name](criterion), devices, optimizer(model, criterion), capture=capture) as step:
        for size in (6, 6, 5):
            x, target = torch.randn(size, 3).double(), torch.randn(size, 2).double()
            expected = WAYS[name](other)(twin(x), target)
            torch.testing.assert_close(step(x, target=target), expected, rtol=1e-12, atol=0)
            reference.zero_grad()
            expected.backward()
            reference.step()
    for one, wanted in ((model, twin), (criterion, other)):
        torch.testing.assert_close(one.state_dict(), wanted.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_the_state_of_a_step_has_them() -> None:
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 2).double()) for _ in range(4)]
    ends = []
    for resumes in (False, True):
        model, criterion = models()
        step = compiled_step(model, criterion.compute, 2, optimizer(model, criterion))
        for i, (x, target) in enumerate(batches):
            if resumes and i == 2:
                state = step.state_dict()
                step.close()
                model, criterion = nn.Linear(3, 2).double(), Criterion().double()
                step = compiled_step(model, criterion.compute, 2, optimizer(model, criterion))
                step.load_state_dict(state)
            step(x, target=target)
        step.close()
        ends.append({**model.state_dict(), **criterion.state_dict()})
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


@pytest.mark.slow
def test_an_object_around_the_module_trains_as_a_graph_and_is_refused_as_plain_pytorch() -> None:
    x, target = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    model, criterion = models()
    expected = criterion.compute(model(x), target)
    with compiled_step(model, Held(criterion), 2, optimizer(model, criterion), capture="dynamo") as step:
        torch.testing.assert_close(step(x, target=target), expected)
    model, criterion = models()
    step = compiled_step(model, Held(criterion), 2, optimizer(model, criterion), capture="autograd")
    with step, pytest.raises(CaptureError, match="MC2306"):
        step(x, target=target)


def test_a_method_as_the_model_is_refused_with_the_function_that_trains_it() -> None:
    _, criterion = models()
    with pytest.raises(TypeError, match=r"(?s)MC1201: model is the method compute of Criterion.*modules=\[net\]"):
        mirrorc.compile(criterion.compute, ["cpu:0"], optimizer=optimizer(criterion), loss_fn=F.mse_loss)
