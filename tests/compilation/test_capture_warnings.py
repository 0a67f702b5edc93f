"""Warnings of a capture that no graph shows."""

import warnings
from typing import Any

import pytest
import torch
from references import unchanged
from tiny_programs import sgd_step
from torch import nn


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, targets: Any) -> torch.Tensor:
        return sum((self.body(x).mean(0) - target["boxes"].mean(0)).square().mean() for target in targets)


def told(num_items: int, num_devices: int = 2, kind: type = list) -> list[str]:
    targets = kind({"boxes": torch.randn(4, 4)} for _ in range(num_items))
    with warnings.catch_warnings(record=True) as caught, sgd_step(Detector(), num_devices) as step:
        warnings.simplefilter("always")
        step(torch.randn(4, 3), targets=targets)
        step(torch.randn(4, 3), targets=targets)
    return [str(warning.message) for warning in caught if "MC1310" in str(warning.message)]


def test_a_list_as_long_as_the_batch_is_warned_of_once() -> None:
    (text,) = told(4)
    assert "'targets', a list of 4 items, is split by items\n" in text and "tuple(targets), if dim 0" in text


def test_a_tuple_as_long_as_the_batch_is_split_by_rows() -> None:
    (text,) = told(4, kind=tuple)
    assert "'targets', a list of 4 items, is split along dim 0 of each tensor in it\n" in text


@pytest.mark.parametrize(("num_items", "num_devices"), [(3, 2), (4, 1)])
def test_other_lists_are_not_spoken_of(num_items: int, num_devices: int) -> None:
    assert not told(num_items, num_devices)


def test_the_warning_as_an_error_leaves_the_model_and_the_step() -> None:
    model, targets = Detector(), [{"boxes": torch.randn(4, 4)} for _ in range(4)]
    with warnings.catch_warnings(), sgd_step(model, 2) as step:
        warnings.simplefilter("error")
        with unchanged(model), pytest.raises(UserWarning, match="MC1310"):
            step(torch.randn(4, 3), targets=targets)
        assert step(torch.randn(4, 3), targets=targets).isfinite()
