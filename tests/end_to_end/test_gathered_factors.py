"""Devices that do not read one memory gather the factors of gradients where that moves fewer bytes than whole buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_training, train_mirrored, train_on_one_device
from torch import nn
from torch.nn import functional as F
from twins import batches_of, compiled_step, same_each_time

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program

APART = {"link": "copy", "disable": ["share-parameters"]}


class Words(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 300, padding_idx=3)
        self.wide, self.head = nn.Linear(300, 450), nn.Linear(450, 3)
        self.is_tied = is_tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.table(x).mean(1)
        if self.is_tied:
            words = words + 0.1 * torch.tanh(words @ self.table.weight.t()) @ self.table.weight
        return self.head(torch.tanh(self.wide(words)))


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def seeded(**options: Any) -> nn.Module:
    return same_each_time(lambda: Words(**options).double())


def batches(sizes: Sequence[int] = (5, 2, 5)) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(0, 9, (size, 3), generator=generator) for size in sizes]
    return [{**batch, "x": x} for batch, x in zip(batches_of(*sizes, outputs=3), words, strict=True)]


def prepared(devices: int = 2, model: nn.Module | None = None, **options: Any) -> Program:
    model = model or seeded()
    with compiled_step(model, F.mse_loss, devices, **APART | options) as step:
        return step.prepare(**batches()[0])


def gathered(program: Program) -> set[str]:
    found = []
    for module in program.device_graphs.values():
        buckets = [program.buckets[bucket_of(node)] for node in calls_to(module.graph, ops.all_gather)]
        found.append({slot.variable for bucket in buckets for slot in bucket.slots})
    assert all(own == found[0] for own in found)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "is_tied", "options"),
    [
        (2, False, {}),
        (3, True, {"clip_grad_norm": 0.1}),
        (3, False, {"microbatches": 2}),
        (2, True, {"exchange": "factors"}),
        (1, False, {}),
    ],
)
def test_devices_train_as_one(devices: int, is_tied: bool, options: dict[str, Any]) -> None:
    model, data = seeded(is_tied=is_tied), batches()
    found = train_mirrored(model, momentum, data, devices, F.mse_loss, **options, **APART)
    if "clip_grad_norm" not in options:
        assert_same_training(found, train_on_one_device(model, momentum, data, F.mse_loss), 1e-12)
    else:
        whole = train_mirrored(model, momentum, data, 1, F.mse_loss, **options)
        assert_same_training(found, whole, 1e-12)


@pytest.mark.slow
def test_what_moves_fewer_bytes_is_chosen_and_can_be_asked_for() -> None:
    program = prepared()
    assert gathered(program) == {"table.weight", "wide.weight"}
    (remark,) = [text for remark in program.remarks if "how devices send gradients" in (text := str(remark))]
    # the rows of 2 or 3 examples with 3 words each, and their indices, against a table of 500 x 300 numbers of 64 bits
    assert "chosen by bytes alone" in remark
    assert (
        f"table.weight as factors ({3 * 3 * 301 * 8 / 1024:.1f} KiB against {500 * 300 * 8 / 2**20:.1f} MiB)" in remark
    )
    assert gathered(prepared(exchange="dense")) == set()
    assert gathered(prepared(exchange="factors")) == {"table.weight", "wide.weight", "head.weight"}
    assert gathered(prepared(exact_order=True)) == set()
    assert gathered(prepared(model=seeded(is_tied=True))) == {
        "wide.weight"
    }  # rows and a product are one dense gradient


def test_devices_that_share_parameters_make_shares_instead() -> None:
    assert gathered(prepared(disable=[])) == set()


@pytest.mark.slow
def test_owners_and_algorithms_get_whole_sums() -> None:
    for options, expected in (
        ({"placement": "mirrored"}, {"table.weight", "wide.weight"}),
        ({"placement": "central"}, set()),
        ({"placement": "mirrored", "algorithm": "ring"}, set()),
        (
            {"placement": "mirrored", "algorithm": "ring", "exchange": "factors"},
            {"table.weight", "wide.weight", "head.weight"},
        ),
    ):
        assert gathered(prepared(disable=[], **options)) == expected, options


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).mean(1)


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() + self.bias


NOTHING = "devices share their parameters, and read gradients in the memory that they share, so nothing is sent"
OWNED = "each gradient is added up whole, by the device that owns its variable"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dense", "factors"),
    [
        ({"devices": 1}, "one device sends no gradient", "one device sends no gradient"),
        ({"disable": []}, NOTHING, NOTHING),
        ({"model": Rows()}, "devices gather rows of table.weight for the optimizer", ""),
        ({"disable": [], "placement": "central"}, "", OWNED),
        ({"model": Bias()}, "", "no gradient is a product, or rows of a table, that they could gather"),
        ({"capture": "autograd"}, "", "no gradient is a product, or rows of a table, that they could gather"),
        ({}, "", ""),
    ],
)
def test_what_is_asked_for_and_has_no_effect_is_said(options: dict[str, Any], dense: str, factors: str) -> None:
    for exchange, why in (("auto", ""), ("dense", dense), ("factors", factors)):
        program = prepared(**{"model": seeded(), **options}, exchange=exchange)
        said = [text for one in program.remarks if "has no effect" in (text := one.text)]
        assert said == ([f"exchange={exchange!r} has no effect: {why}"] if why else [])


def test_factors_are_not_asked_for_where_the_pass_is_left_out() -> None:
    for left_out in ({"exact_order": True}, {"disable": ["factor-gradients"]}):
        with pytest.raises(
            ValueError,
            match=r"exchange='factors' cannot be used with this pipeline\n  why:  the pass 'factor-gradients'",
        ):
            prepared(exchange="factors", **left_out)
