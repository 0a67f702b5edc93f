"""Every packing, every algorithm of all-reduce and every placement together, against one device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.packing import ByBytes, EqualSplits
from mirrorc.passes import ALGORITHMS

Combination = tuple[Any, str, Any, int, str | None]

PACKINGS = (None, ByBytes(0.0003, 0.0001), 0, 3, EqualSplits(2))
PLACEMENTS = ("auto", "mirrored", "central", "least-loaded", "cached", {"0.weight": "cpu:0", "*": "least-loaded"})
NUM_DEVICES = (1, 2, 3, 4, 8)
LINKS = (None, "copy")
NUM_STEPS = 3
NUM_EXAMPLES = 9  # no number of devices but 3 deals them out evenly


def made_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    sizes = ((NUM_EXAMPLES, 7), (NUM_EXAMPLES, 3))
    return [
        tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)  # type: ignore[misc]
        for _ in range(NUM_STEPS)
    ]


def on_one_device() -> list[torch.Tensor]:
    model = made_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compiled(model: nn.Module, combination: Combination) -> mirrorc.Step:
    packing, all_reduce, placement, num_devices, link = combination
    return mirrorc.compile(
        model,
        devices=num_devices,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss_fn=F.mse_loss,
        backend="eager",
        packing=packing,
        all_reduce=all_reduce,
        placement=placement,
        link=link,
    )


def check(combinations: Sequence[Combination]) -> None:
    """Each agrees with one device after some steps, or is refused at `compile` by a reason that names an option."""
    expected, num_trained = on_one_device(), 0
    for combination in combinations:
        model = made_model()
        try:
            step = compiled(model, combination)
        except ValueError as error:
            assert any(option in str(error) for option in ("packing=", "all_reduce=", "placement=")), combination
            continue
        with step:
            for x, y in batches():
                step(x, target=y)
        num_trained += 1
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=1e-12, msg=str(combination))
    assert num_trained > len(combinations) // 3, "most were refused"


def every_pair(axes: Sequence[Sequence[Any]]) -> list[Combination]:
    """Rows of the table in which every two values of two axes come together at least once."""
    rows: list[Combination] = []
    missing = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2)
        for a, b in itertools.product(range(len(first)), range(len(second)))
    }
    table = list(itertools.product(*(range(len(axis)) for axis in axes)))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    while missing:
        best = max(table, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))  # type: ignore[arg-type]
    return rows


def test_packings_algorithms_and_placements_together() -> None:
    rows = list(zip(itertools.cycle(PACKINGS), ALGORITHMS, strict=False))[::2]  # every other algorithm once
    check([(packing, name, "auto", 3, None) for packing, name in rows])
    places = list(zip(itertools.cycle(PACKINGS), reversed(PLACEMENTS), strict=False))[::2]  # every other placement once
    check([(packing, "native", place, 2, "copy") for packing, place in places])


@pytest.mark.slow
def test_every_two_values_come_together() -> None:
    check([(packing, "native", place, 2, "copy") for packing, place in itertools.product(PACKINGS, PLACEMENTS)])
    check(every_pair((PACKINGS, tuple(ALGORITHMS), PLACEMENTS[:2], NUM_DEVICES, LINKS)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_the_whole_table(num_devices: int) -> None:
    check(list(itertools.product(PACKINGS, ALGORITHMS, PLACEMENTS, (num_devices,), LINKS)))


@pytest.mark.parametrize("placement", ["central", "least-loaded", {"narrow.weight": "cpu:1", "*": "cpu:2"}])
def test_a_device_that_owns_nothing_measures_gradients_of_two_dtypes(placement: Any) -> None:
    class Narrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x).float())

    found = []
    for place in (placement, "mirrored"):
        torch.manual_seed(3)
        model = Narrowed()
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options: dict[str, Any] = {"clip_grad_norm": 0.1, "placement": place, "backend": "eager"}
        with mirrorc.compile(model, 3, optimizer=optimizer, loss_fn=F.cross_entropy, **options) as step:
            step(x, target=y)
            found.append([step.grad_norm, *model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))
