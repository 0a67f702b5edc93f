"""Buffers that keep rows of examples, such as a memory bank: what is said of them, and what makes them those of one device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from references import assert_same_model
from selections import slow
from torch import nn
from twins import Twins, compiled_step

import mirrorc

Write = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Bank(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write = nn.Linear(3, 4).double(), write
        self.register_buffer("bank", torch.zeros(10, 4, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.write(self, h.detach(), index)
        return (h * self.bank[index]).mean() + h.square().mean()


def put(model: Any, h: torch.Tensor, index: torch.Tensor) -> None:
    model.bank[index] = h


def put_those_of_all(model: Any, h: torch.Tensor, index: torch.Tensor) -> None:
    model.bank[mirrorc.all_gather(index)] = mirrorc.all_gather(h)


def enqueue(model: Any, h: torch.Tensor, index: torch.Tensor) -> None:
    """As MoCo does, at the same places on each replica."""
    model.bank[(model.place + torch.arange(len(h))) % 10] = h
    model.place.copy_((model.place + len(h)) % 10)


def write_statistics(model: Any, h: torch.Tensor, index: torch.Tensor) -> None:
    model.bank.mul_(0.9).add_(h.mean(0), alpha=0.1)
    model.bank[0] = h.amax(0)


WRITES: list[tuple[Write, bool]] = [
    (put, True),
    *slow(
        (lambda model, h, index: model.bank.scatter_(0, index[:, None].expand(-1, 4), h), True),
        (lambda model, h, index: model.bank.index_copy_(0, index, 0.9 * model.bank[index] + h), True),
        (lambda model, h, index: model.bank.copy_(torch.cat([h, model.bank])[:10]), True),
        (enqueue, True),
        (write_statistics, False),
    ),
]


def batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size, 3, generator=generator, dtype=torch.float64),
        torch.randperm(10, generator=generator)[:size],
    )


def said(model: nn.Module, devices: int, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, compiled_step(model, None, devices, **options) as step:
        warnings.simplefilter("always")
        for seed in range(2):
            step(*batch(5, seed))
    return [f"{w.filename}: {w.message}" for w in caught if "MC3306" in str(w.message)]


@pytest.mark.parametrize(("write", "is_of_rows"), WRITES)
def test_a_buffer_that_keeps_rows_of_examples_is_warned_of_once(write: Write, is_of_rows: bool) -> None:
    for capture in ("dynamo", "autograd"):
        texts = said(Bank(write), 2, capture=capture)
        assert len(texts) == is_of_rows
        assert all("writes rows of the buffer 'bank'" in text and "mirrorc.all_gather(index)" in text for text in texts)
        assert capture == "autograd" or all(text.startswith(__file__) for text in texts), "it names the line"


def test_one_device_keeps_them_exactly() -> None:
    assert said(Bank(put), 1) == said(Bank(put), 1, microbatches=2, capture="autograd") == []


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_rows_that_all_replicas_gather_are_those_of_one_device(devices: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Twins(Bank(put_those_of_all), devices=devices) as pair:
            for seed, size in enumerate((5, 4, 7, 2)):
                pair.train(*batch(size, seed))
            pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_rows_that_are_written_between_steps_are_those_of_one_device(capture: str) -> None:
    class Returns(Bank):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
            h = self.layer(x)
            return (h * self.bank[index]).mean() + h.square().mean(), h

    model = Returns(put)
    twin, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    with compiled_step(model, None, 2, optimizer, capture=capture, return_outputs=True) as step:
        for seed, size in enumerate((5, 4, 5)):
            x, index = batch(size, seed)
            loss, rows = twin(x, index)
            plain.zero_grad()
            loss.backward()
            plain.step()
            twin.bank[index] = rows.detach()
            model.bank[index] = step(x, index)[1][1]
    assert_same_model(model, twin, 1e-12)
