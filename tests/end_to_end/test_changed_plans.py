"""Packings, algorithms and placements may change from one step to the next, or from a run to the one that goes on with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from selections import slow, slow_but
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc

PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "cut packs": {"packing": 3},
    "a ring over copies": {"all_reduce": "ring", "link": "copy"},
    "cut packs in a tree": {"packing": 2, "all_reduce": "tree", "link": "copy"},
    "owners": {"placement": "least-loaded"},
}
SIZES = (7, 2, 7, 1, 7, 2)  # some batches have fewer examples than there are devices


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 7, generator=generator, dtype=torch.float64),
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
        )
        for size in SIZES
    ]


def on_one_device() -> list[torch.Tensor]:
    model, optimizer = made()
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, plan: str) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss, 3, optimizer=optimizer, **PLANS[plan])


def assert_trained(model: nn.Module) -> None:
    for parameter, wanted in zip(model.parameters(), on_one_device(), strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_but(["cut packs in a tree", "owners"], PLANS))
def test_ragged_batches_are_those_of_one_device(plan: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, plan) as step:
        for x, y in batches():
            step(x, target=y)
    assert_trained(model)


@pytest.mark.parametrize(
    ("one", "other"),
    [("owners", "cut packs in a tree"), *slow(("default", "cut packs"), ("a ring over copies", "owners"))],
)
def test_two_steps_over_one_model_take_turns(one: str, other: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, one) as first, compiled(model, optimizer, other) as second:
        for i, (x, y) in enumerate(batches()):
            (first, second)[i % 2](x, target=y)
    assert_trained(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("cut packs", "owners"), *slow(("owners", "a ring over copies"), ("cut packs in a tree", "default"))],
)
def test_another_plan_goes_on_with_a_checkpoint(one: str, other: str) -> None:
    model, optimizer = made()
    first, rest = batches()[:3], batches()[3:]
    with compiled(model, optimizer, one) as step:
        for x, y in first:
            step(x, target=y)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = made()
    with compiled(model, optimizer, other) as step:
        step(*first[0][:1], target=first[0][1])  # in the memory of the other plan, too
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for x, y in rest:
            step(x, target=y)
    assert_trained(model)
