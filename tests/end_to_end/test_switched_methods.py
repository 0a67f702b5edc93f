"""A method of a C class that Python code holds may be another one in the next step, wherever it is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from selections import exhaustive, slow_but
from torch import nn
from torch.nn import functional as F
from twins import Twins

METHODS: dict[str, tuple[Any, Any]] = {
    "methods": (torch.Tensor.add, torch.Tensor.mul),
    "slots": (torch.Tensor.__add__, torch.Tensor.__mul__),
}

held: Any = torch.Tensor.add


class OfClass:
    held: Any = torch.Tensor.add


def default(x: torch.Tensor, held: Any = torch.Tensor.add) -> torch.Tensor:
    return held(x, x.tanh())


class Holder(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(4, 4), place
        self.method: Any = torch.Tensor.add
        self.table, self.listed = {"one": self.method}, [self.method]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.place == "default":
            return y + default(y)
        if self.place == "closure":
            return y + self.closure(y)
        method = {
            "attribute": lambda: self.method,
            "dict": lambda: self.table["one"],
            "list": lambda: self.listed[0],
            "global": lambda: held,
            "class": lambda: OfClass.held,
        }[self.place]()
        return y + method(y, y.tanh())

    def hold(self, method: Any) -> None:
        global held
        held = OfClass.held = self.method = self.table["one"] = self.listed[0] = method
        default.__defaults__ = (method,)
        self.closure = _calling(method)


def _calling(method: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        return method(x, x.tanh())

    return call


PLACES = ("attribute", "dict", "list", "global", "class", "default", "closure")


@pytest.mark.filterwarnings("ignore:MC2701")
@pytest.mark.parametrize("num_devices", [2, *exhaustive((1,), (3,))])
@pytest.mark.parametrize("kind", slow_but(["methods"], METHODS))
@pytest.mark.parametrize("place", slow_but(["attribute"], PLACES))
def test_the_next_step_calls_what_is_held_then(place: str, kind: str, num_devices: int) -> None:
    torch.manual_seed(0)
    model = Holder(place).double()
    first, second = METHODS[kind]
    model.hold(first)
    with Twins(model, loss_fn=F.mse_loss, devices=num_devices) as pair:
        for method in (first, first, second, second, first):
            pair.on_both(lambda own, _, method=method: own.hold(method))
            pair.train(torch.randn(6, 4).double(), target=torch.randn(6, 4).double())
        pair.check()
    assert held is first
