"""Python values that forward returns without looking at them are those of each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import compiled_step

SETTINGS = {"mode": "first"}
NAMES: list[str] = []


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    name: str
    extras: Any


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.units = {"loss": "nats"}

    def forward(self, x: torch.Tensor, name: Any = "a") -> Result:
        extras = Extras()
        extras.mode, extras.units = SETTINGS["mode"], [self.units["loss"]]
        return Result(self.linear(x).square().mean(), name, {"extras": extras})


class Extras:
    mode: str
    units: list[str]


def rename(model: Passing) -> dict[str, Any]:
    return {"name": "b"}


def change_the_units(model: Passing) -> dict[str, Any]:
    model.units["loss"] = "bits"
    return {}


def change_the_mode(model: Passing) -> dict[str, Any]:
    SETTINGS["mode"] = "second"
    return {}


@pytest.mark.parametrize("change", [rename, change_the_units, change_the_mode])
def test_values_that_forward_only_returns_are_those_of_each_call(
    change: Callable[[Passing], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "mode", "first")
    model, x = Passing(), torch.randn(4, 3)
    with compiled_step(model, return_outputs=True) as step:
        for call in ({}, change(model)):
            found, expected = step(x, **call)[1], model(x, **call)
            assert found.name == expected.name
            assert vars(found.extras["extras"]) == vars(expected.extras["extras"])


def test_values_that_forward_only_keeps_are_no_reason_to_compile_anew() -> None:
    class Keeping(Passing):
        def forward(self, x: torch.Tensor, name: Any = "a") -> torch.Tensor:  # type: ignore[override]
            NAMES.append(name)
            return self.linear(x).square().mean()

    model = Keeping()
    with (
        compiled_step(model) as step,
        pytest.warns(UserWarning, match="NAMES"),
    ):
        programs = set()
        for name in ("a", "b"):
            step(torch.ones(4, 3), name=name)
            programs.add(id(step.programs[-1]))
    assert len(programs) == 1
