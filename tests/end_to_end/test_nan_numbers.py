"""Python numbers that are nan, which differs from itself: what is read has a program, and not a new one in each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twins import Twins, compiled_step


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, number: Any = None) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if number is None:
            number = self.scale
        if isinstance(number, tuple):
            number = number[0] + number[1][0]
        return y + number


def set_scale(model: Read, number: float) -> None:
    model.scale = number


PLACES: dict[str, tuple[Callable[[Read, float], Any], int]] = {
    "an argument": (lambda model, number: number, 3),
    "an attribute": (set_scale, 3),
    "a part of a tuple": (lambda model, number: (0.0, (number,)), 4),  # each value of a tuple has a program
    "numpy's float64": (lambda model, number: np.float64(number), 2),
    "numpy's float32": (lambda model, number: np.float32(number), 2),
}
"""How the model gets a number, and how many programs serve 1, 2, 3 and nan."""


def numbers() -> list[float]:
    """Nan as one object, which is equal to itself in a tuple, and as new ones."""
    nan, new, other = math.nan, float("nan"), float("nan")
    return [1.0, nan, nan, new, 2.0, other, 3.0, nan, new]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (torch.nan_to_num(output, nan=0.5) - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_nan_again_is_no_new_program_and_outputs_are_nan(place: str) -> None:
    give, num_programs = PLACES[place]
    torch.manual_seed(0)
    programs: list[int] = []
    of_nan = set()
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Twins(Read().double(), make, loss_fn, return_outputs=True) as pair:
        for number in numbers():
            x, target = torch.randn(5, 3, dtype=torch.float64), torch.zeros(5, 2, dtype=torch.float64)
            expected = pair.twin(x, give(pair.twin, number)).detach()
            loss, outputs = pair.step(x, give(pair.model, number), target=target)
            torch.testing.assert_close(outputs, expected, equal_nan=True)
            torch.testing.assert_close(loss, pair.plain(x, give(pair.twin, number), target=target))
            assert outputs.isnan().all() if math.isnan(number) else outputs.isfinite().all()
            programs.append(id(pair.step.programs[-1]))
            if math.isnan(number):
                of_nan.add(programs[-1])
        pair.check()
    assert len(of_nan) == 1 and len(set(programs)) == num_programs


def test_a_loss_that_is_nan_is_that_of_plain_pytorch() -> None:
    model = Read().double()
    with compiled_step(model, nn.functional.mse_loss) as step:
        for number in (1.0, math.nan, 2.0):
            loss = step(torch.ones(4, 3).double(), number, target=torch.zeros(4, 2).double())
            assert loss.isnan() == (number != 1.0)
    assert all(parameter.isnan().all() for parameter in model.parameters())
