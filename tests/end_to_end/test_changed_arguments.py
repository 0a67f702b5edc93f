"""What forward does to containers that it was passed is refused, or said once, at the user's line."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import unchanged
from torch import nn
from twins import compiled_step

from mirrorc import CaptureError


@dataclasses.dataclass
class Batch:
    hidden: torch.Tensor
    n: int = 0


class Takes(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, 3), does

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        y = self.layer(x)
        return y + self.does(given, y)


def append(given: Any, y: torch.Tensor) -> torch.Tensor:
    last = given[-1]
    given.append(y.detach())
    return last


def append_to_plain(given: Any, y: torch.Tensor) -> torch.Tensor:
    given.append(1)
    return y * len(given)


def remember(given: Any, y: torch.Tensor) -> torch.Tensor:
    last = given["h"]
    given["h"] = y.detach()
    return last


def count_in_an_empty_dict(given: Any, y: torch.Tensor) -> torch.Tensor:
    n = given.get("n", 0)
    given["n"] = n + 1
    return y * n


def count_in_a_dataclass(given: Any, y: torch.Tensor) -> torch.Tensor:
    given.n += 1
    return y * given.n


def remember_within(given: Any, y: torch.Tensor) -> torch.Tensor:
    given["inner"]["states"][0] = y
    return y


def read_only(given: Any, y: torch.Tensor) -> torch.Tensor:
    return given["h"] * len(given) + sum(value for value in given.values())


def pop_from_its_own(given: Any, y: torch.Tensor) -> torch.Tensor:
    def inner(**kwargs: torch.Tensor) -> torch.Tensor:
        return kwargs.pop("h")

    return inner(**given)


def change_a_copy(given: Any, y: torch.Tensor) -> torch.Tensor:
    given = dict(given)
    given["n"] = 1
    return given.pop("h")


def copy_a_dataclass(given: Any, y: torch.Tensor) -> torch.Tensor:
    return dataclasses.replace(given, n=3).hidden * given.n


def read_what_is_missing(given: Any, y: torch.Tensor) -> torch.Tensor:
    return y * len(given["none"])


def put_back(given: Any, y: torch.Tensor) -> torch.Tensor:
    given["h"] = given["h"]
    return y


def step_once(
    does: Callable[[Any, torch.Tensor], torch.Tensor], given: Any, **options: Any
) -> list[warnings.WarningMessage]:
    model = Takes(does)
    with (
        warnings.catch_warnings(record=True) as caught,
        unchanged(model) if does in REFUSED else contextlib.nullcontext(),
        compiled_step(model, F.mse_loss, **options) as step,
    ):
        warnings.simplefilter("always")
        step(torch.ones(4, 3), given, target=torch.zeros(4, 3))
    return caught


def hidden() -> torch.Tensor:
    return torch.zeros(4, 3)


REFUSED: dict[Callable[[Any, torch.Tensor], torch.Tensor], tuple[list[Callable[[], Any]], str, str]] = {
    append: ([lambda: [hidden()], lambda: collections.deque([hidden()])], "given", "given.append(y.detach())"),
    remember: (
        [lambda: {"h": hidden()}, lambda: collections.OrderedDict(h=hidden())],
        "given",
        'given["h"] = y.detach()',
    ),
    count_in_an_empty_dict: ([dict], "given", 'given["n"] = n + 1'),
    count_in_a_dataclass: ([lambda: Batch(hidden())], "given", "given.n += 1"),
    remember_within: (
        [lambda: {"inner": {"states": [hidden()]}}],
        "given.inner.states",
        'given["inner"]["states"][0] = y',
    ),
}


@pytest.mark.slow
def test_a_change_of_a_container_among_the_arguments_is_refused_with_its_line() -> None:
    for does, (kinds, name, line) in REFUSED.items():
        for made in kinds:
            with pytest.raises(CaptureError, match="fix:  change a copy") as refused:
                step_once(does, made())
            text = str(refused.value)
            assert re.search(
                rf"changes its argument {name!r}\n  at:   {re.escape(__file__)}:\d+  .*{re.escape(line)}", text
            ), text


@pytest.mark.parametrize("given", [[], [1, 2]])
def test_a_list_of_plain_values_among_the_arguments_whose_change_counts_is_not_captured(given: list[int]) -> None:
    before = list(given)
    with pytest.raises(CaptureError, match=r"reads and changes given\n  at:   .*given.append\(1\)"):
        step_once(append_to_plain, given, capture="dynamo")
    assert given == before
    step_once(append_to_plain, given)
    assert given == [*before, 1]


@pytest.mark.slow
def test_arguments_that_are_only_read_or_copied_are_taken() -> None:
    for does in (read_only, pop_from_its_own, change_a_copy, put_back):
        assert step_once(does, {"h": hidden()}) == []
    assert step_once(copy_a_dataclass, Batch(hidden())) == []
    assert step_once(read_what_is_missing, collections.defaultdict(list, h=hidden())) == []
    assert step_once(read_what_is_missing, collections.defaultdict(str, h=hidden())) == []


def test_items_that_are_taken_out_of_an_argument_are_spoken_of() -> None:
    for made, does in (
        ({"h": hidden(), "n": 1}, lambda given, y: given.pop("h")),
        ([hidden()], lambda given, y: given.pop()),
    ):
        (warning,) = step_once(does, made)
        assert "Takes takes items out of its argument 'given', which stay in yours" in str(warning.message)
        assert warning.filename == __file__ and made
