"""Buffers that forward or loss assigns: the model's buffer gets the value, as by ``copy_``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import selections
import torch
from references import unchanged
from torch import nn
from twins import Twins, compiled_step

from mirrorc.errors import CaptureError


class Centered(nn.Module):
    def __init__(self, assign: Callable[[Any, torch.Tensor], None], *, scales: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("center", torch.zeros(2))
        self.inner = nn.BatchNorm1d(2, affine=False)
        self.inner.register_buffer("last", torch.ones(2))
        self.assign, self.scales = assign, scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        scaled = h * self.center if self.scales else h  # backward needs the former value
        self.assign(self, h.detach().mean(0))
        return h - self.center + scaled


def mean(model: Any, value: torch.Tensor) -> None:
    model.center = model.center * 0.9 + value * 0.1


def entry(model: Any, value: torch.Tensor) -> None:
    model._buffers["center"] = model.center * 0.9 + value * 0.1


def registered(model: Any, value: torch.Tensor) -> None:
    model.register_buffer("center", model.center * 0.9 + value * 0.1)


def nested(model: Any, value: torch.Tensor) -> None:
    model.inner.last = model.inner.last * 0.9 + value
    model.center = model.inner.last.sin()


def several(model: Any, value: torch.Tensor) -> None:
    former = model.center
    model.center = model.center * 0.9 + value * 0.1
    model.center = model.center + former
    model.center.mul_(0.5)


def exchanged(model: Any, value: torch.Tensor) -> None:
    model.center, model.inner.last = model.inner.last, model.center + value


def constant(model: Any, value: torch.Tensor) -> None:
    model.center = torch.ones(2, dtype=torch.float64) / 4


def through_none(model: Any, value: torch.Tensor) -> None:
    model.center = None
    model.center = value * 0.5


WAYS = (mean, entry, registered, nested, several, exchanged, constant, through_none)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "assign", [mean, *selections.slow(*((way,) for way in WAYS if way is not mean))], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_an_assigned_buffer_is_that_of_one_device(assign: Callable[..., None], capture: str) -> None:
    with Twins(Centered(assign).double(), loss_fn=loss_fn, devices=1, capture=capture) as pair:
        held = pair.model.center
        for _ in range(3):
            x, target = torch.randn(6, 3).double(), torch.randn(6, 2).double()
            torch.testing.assert_close(pair.step(x, target=target), pair.plain(x, target=target))
        pair.check()
        assert pair.model.center is held is pair.model.state_dict(keep_vars=True)["center"]
        torch.testing.assert_close(pair.model.state_dict(), pair.twin.state_dict(), rtol=1e-12, atol=1e-12)


def copied(model: Any, value: torch.Tensor) -> None:
    model.center.copy_(model.center * 0.9 + value * 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 3}, {"devices": 2, "microbatches": 2}], ids=str)
def test_replicas_assign_as_they_copy(capture: str, options: dict[str, Any]) -> None:
    states = []
    for assign in (mean, copied):
        torch.manual_seed(0)
        model = Centered(assign, scales=False).double()
        with compiled_step(model, loss_fn, capture=capture, **options) as step:
            for size in (8, 8, 7):
                step(torch.randn(size, 3).double(), target=torch.randn(size, 2).double())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    torch.testing.assert_close(states[0], states[1], rtol=1e-12, atol=1e-12)


class CenteredLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (output - target - self.center).square().mean()
        self.center = self.center * 0.9 + output.detach().mean(0) * 0.1
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_a_loss_assigns_its_buffer(capture: str) -> None:
    loss, other = CenteredLoss().double(), CenteredLoss().double()
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, target = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    with compiled_step(model, loss, devices=1, capture=capture) as step:
        for _ in range(3):
            expected = other(model(x), target)
            torch.testing.assert_close(step(x, target=target), expected)
    torch.testing.assert_close(loss.center, other.center)


def of_another_dtype(model: Any, value: torch.Tensor) -> None:
    model.center = value.float()


def of_another_shape(model: Any, value: torch.Tensor) -> None:
    model.center = value[:1]


def with_a_graph(model: Any, value: torch.Tensor) -> None:
    model.center = model.layer.bias * 2


REFUSED = {of_another_dtype: r"f32\[2\]", of_another_shape: r"f64\[1\]", with_a_graph: "requires a gradient"}


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "dynamo", "autograd"])
@pytest.mark.parametrize("assign", REFUSED, ids=lambda way: way.__name__)
def test_a_tensor_of_another_kind_is_refused_in_a_sentence(assign: Callable[..., None], capture: str) -> None:
    model = Centered(assign).double()
    batch = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    with compiled_step(model, loss_fn, capture=capture) as step:
        with unchanged(model), pytest.raises(CaptureError, match=f"MC2304[^\\n]*{REFUSED[assign]}"):
            step(batch[0], target=batch[1])
        model.assign = mean
        step(batch[0], target=batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_a_buffer_of_two_modules_is_not_assigned_in_one(capture: str) -> None:
    model = Centered(mean).double()
    model.inner.register_buffer("same", model.center)
    with compiled_step(model, loss_fn, capture=capture) as step, unchanged(model), pytest.raises(CaptureError):
        step(torch.randn(6, 3).double(), target=torch.randn(6, 2).double())
