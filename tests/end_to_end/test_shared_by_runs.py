"""What replicas that run as plain PyTorch have in common: collections, generators, classes and context variables."""

from __future__ import annotations

import contextvars
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from branching import batches
from references import assert_same_parameters, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step, sgd

import mirrorc


class Does(nn.Module):
    def __init__(self, deed: Callable[[Any, torch.Tensor], Any], own: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
        self.deed, self.own = deed, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(h * self.deed(self.own, h))


compile_plain = partial(compiled_step, loss_fn=F.cross_entropy, capture="autograd")


def rotated(own: Any, h: torch.Tensor) -> Any:
    own.rotate(1)
    return own[0]


def counted(own: Any, h: torch.Tensor) -> Any:
    own["calls"] += 1
    return own["calls"]


COLLECTIONS = [(rotated, deque([1.0, 2.0, 3.0])), (counted, Counter(calls=1)), (counted, defaultdict(float))]
GENERATORS = [
    (lambda own, h: torch.rand(8, generator=own), lambda: torch.Generator().manual_seed(1), "torch.Generator"),
    (lambda own, h: torch.empty(8).normal_(generator=own), lambda: torch.Generator().manual_seed(1), "torch.Generator"),
    (lambda own, h: own.random(), lambda: random.Random(1), "model.own, a random.Random"),
    (
        lambda own, h: float(own.random()),
        lambda: np.random.default_rng(1),
        "model.own, a numpy.random._generator.Generator",
    ),
    (lambda own, h: own.rand(), lambda: np.random.RandomState(1), "model.own, a numpy.random.mtrand.RandomState"),
]


@pytest.mark.parametrize(("deed", "own"), COLLECTIONS, ids=lambda value: type(value).__name__)
def test_a_collection_of_any_kind_is_changed_once_a_step(deed: Any, own: Any) -> None:
    with Twins(Does(deed, own), sgd, F.cross_entropy, capture="autograd", tolerance=1e-12) as pair:
        for batch in batches(6, 5):
            pair.train(**batch)
        assert pair.model.own == pair.twin.own


@pytest.mark.parametrize(("deed", "make", "words"), GENERATORS, ids=lambda value: "")
def test_a_generator_of_ones_own_that_replicas_would_share_is_refused_and_put_back(
    deed: Any, make: Any, words: str
) -> None:
    """Which number each replica gets would follow their threads, so that two runs would differ."""
    model = Does(deed, make())
    h = torch.zeros(1)
    with (
        compile_plain(model) as step,
        unchanged(model),
        pytest.raises(
            mirrorc.CaptureError, match=rf"draws from .*{words}.*\n.*follow their threads\n  fix:.*torch.rand"
        ),
    ):
        step(**batches(6)[0])
    assert torch.equal(torch.as_tensor(deed(model.own, h)), torch.as_tensor(deed(make(), h)))


def test_a_generator_that_is_torchs_own_is_a_stream_of_each_replica() -> None:
    model = Does(lambda own, h: torch.rand(8, generator=torch.default_generator))
    with compile_plain(model) as step:
        assert step(**batches(6)[0]).isfinite()


class Doubles(Does):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class DoublingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def one(own: Any, h: torch.Tensor) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "autograd"])
@pytest.mark.parametrize("where", ["model", "layer"])
def test_another_class_of_a_module_counts_in_the_next_step(where: str, capture: str) -> None:
    with Twins(Does(one), loss_fn=F.cross_entropy, capture=capture, tolerance=1e-12) as pair:
        for i, batch in enumerate(batches(6, 6, 6, 6, 6)):
            if i >= 3:
                for own, _ in pair.sides:
                    changed, kind = (own, Doubles) if where == "model" else (own.last, DoublingLinear)
                    changed.__class__ = kind if i == 3 else kind.__base__  # type: ignore[assignment]
            pair.train(**batch)


_factor: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=1.0)


class ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * _factor.get()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("capture", ["auto", "autograd"])
def test_context_variables_are_those_of_the_caller_in_each_step(capture: str, num_devices: int) -> None:
    def reads(own: Any, h: torch.Tensor) -> Any:
        return _factor.get() * ReadsBackward.apply(h)

    token = _factor.set(1.0)
    with Twins(Does(reads), sgd, F.cross_entropy, num_devices, capture=capture, tolerance=1e-12) as pair:
        for i, batch in enumerate(batches(6, 6, 6)):
            _factor.set(1.0 + i)
            expected = F.cross_entropy(pair.twin(batch["x"]), batch["target"]).item()
            assert pair.step.evaluate(**batch).item() == pytest.approx(expected, rel=1e-12)
            pair.train(**batch)
        assert_same_parameters(pair.model, pair.twin)
    _factor.reset(token)
