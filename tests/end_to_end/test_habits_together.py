"""Habits of a loop that meet in one step: kept gradients, parts of a batch, several optimizers, clipping, uneven batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from references import assert_same_parameters
from selections import exhaustive, slow
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
CALLS = ([8], [7, 8], [3, 8, 5], [1, 2], [9])  # the numbers of examples of the calls up to each update


def one(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.1)]


def two(model: Any) -> list[torch.optim.Optimizer]:
    by_shares = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    return [by_shares, torch.optim.Adadelta(model[2].parameters(), lr=0.5)]


UNSHARED = {"disable": ["share-parameters"]}
CASES: list[tuple[int, int, Optimizers, dict[str, Any]]] = [
    (2, 2, two, {"clip_grad_norm": 0.05}),
]
MORE: list[tuple[int, int, Optimizers, dict[str, Any]]] = [
    (3, 2, one, UNSHARED),
    (2, 3, one, {"clip_grad_norm": 0.05, "return_outputs": True}),
]
OTHERS: list[tuple[int, int, Optimizers, dict[str, Any]]] = [
    (1, 1, two, {}),
    (2, 2, two, {**UNSHARED, "check_finite": True}),
    (4, 2, two, {"clip_grad_norm": 0.05}),
    (2, 1, two, UNSHARED),
    (3, 2, two, {"clip_grad_value": 0.01}),
    (2, 2, two, {"clip_grad_norm": 0.05, "backend": "inductor"}),
]


@pytest.mark.parametrize(
    ("num_devices", "microbatches", "make", "options"), [*CASES, *slow(*MORE), *exhaustive(*OTHERS)]
)
def test_updates_are_those_of_one_device_on_all_examples(
    num_devices: int, microbatches: int, make: Optimizers, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    plain = copy.deepcopy(model)
    optimizers, plain_optimizers = make(model), make(plain)
    with compiled_step(model, F.mse_loss, num_devices, optimizers, microbatches=microbatches, **options) as step:
        for sizes in CALLS:
            batches = [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for n in sizes]
            for x, y in batches[:-1]:
                step.accumulate(x, target=y)
            x, y = batches[-1]
            step(x, target=y)
            for optimizer in plain_optimizers:
                optimizer.zero_grad()
            whole, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            F.mse_loss(plain(whole), targets).backward()
            if "clip_grad_norm" in options:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), options["clip_grad_norm"])
                torch.testing.assert_close(step.grad_norm, norm)
            if "clip_grad_value" in options:
                nn.utils.clip_grad_value_(plain.parameters(), options["clip_grad_value"])
            for optimizer in plain_optimizers:
                optimizer.step()
            assert_same_parameters(model, plain, 1e-10)
