"""Packings, algorithms and placements may change from one step to the next, or from a run to the one that goes on with it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_parameters, train_on_one_device
from selections import slow
from torch import nn
from torch.nn import functional as F
from twins import batches_of, compiled_step, layers_of_odd_sizes

import mirrorc
from mirrorc.packing import EqualPacks

PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "cut packs": {"buckets": EqualPacks(3)},
    "a ring over copies": {"algorithm": "ring", "link": "copy"},
    "cut packs in a tree": {"algorithm": "tree", "link": "copy", "buckets": EqualPacks(2)},
    "owners": {"placement": "least-loaded"},
}
SIZES = (7, 2, 7, 1, 7, 2)  # some batches have fewer examples than there are devices

ADAM = partial(torch.optim.Adam, lr=0.01)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers_of_odd_sizes()
    return model, ADAM(model.parameters())


BATCHES = batches_of(*SIZES, features=7, outputs=3, name="input")


def assert_trained(model: nn.Module) -> None:
    assert_same_parameters(model, train_on_one_device(made()[0], ADAM, BATCHES, F.mse_loss).model)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, plan: str) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss, 3, optimizer=optimizer, **PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_ragged_batches_are_those_of_one_device(plan: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, plan) as step:
        for batch in BATCHES:
            step(**batch)
    assert_trained(model)


@pytest.mark.parametrize(
    ("one", "other"),
    [("owners", "cut packs in a tree"), *slow(("default", "cut packs"), ("a ring over copies", "owners"))],
)
def test_two_steps_over_one_model_take_turns(one: str, other: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, one) as first, compiled(model, optimizer, other) as second:
        for i, batch in enumerate(BATCHES):
            (first, second)[i % 2](**batch)
    assert_trained(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("cut packs", "owners"), ("owners", "a ring over copies"), ("cut packs in a tree", "default")],
)
def test_another_plan_goes_on_with_a_checkpoint(one: str, other: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, one) as step:
        for batch in BATCHES[:3]:
            step(**batch)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = made()
    with compiled(model, optimizer, other) as step:
        step(**BATCHES[0])  # in the memory of the other plan, too
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for batch in BATCHES[3:]:
            step(**batch)
    assert_trained(model)
