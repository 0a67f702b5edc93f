"""Forward decides by numbers that Python or numpy draw: a step draws them once for all replicas, as one device would."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from references import assert_same_model
from selections import exhaustive
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.capture.dynamo.drawn_branches import DrawnScalar
from mirrorc.errors import CaptureError, ExecutionError


class LeavesOutLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if self.training and (random.random() if i else np.random.rand()) < 0.5:
                continue
            x = x + layer(x).tanh()
        torch._assert_async((x < 1e9).all(), "too large")
        return self.head(x) * random.uniform(0.5, 1.0) + np.random.randint(3)


class Does(nn.Module):
    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, 3), does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self.layer(x))


def compiled(model: nn.Module) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss)


def seed_all() -> None:
    random.seed(5)
    np.random.seed(6)


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "backend"), [(2, "eager"), (4, "eager"), *exhaustive((1, "eager"), (2, "inductor"))]
)
def test_layers_are_left_out_as_on_one_device(num_devices: int, backend: str) -> None:
    torch.manual_seed(0)
    target = torch.zeros(5, 3, dtype=torch.float64)
    batches = [{"x": torch.randn(5, 3, dtype=torch.float64), "target": target} for _ in range(9)]
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Twins(LeavesOutLayers().double(), sgd, F.mse_loss, num_devices, backend=backend) as pair:
        seed_all()
        expected = [pair.plain(**batch).item() for batch in batches]
        wanted = states()
        seed_all()
        losses = [pair.step(**batch).item() for batch in batches]
        assert states() == wanted
        assert repr(pair.step).endswith("4 compiled programs>"), "each way through two layers is one"
        pair.model.eval()
        pair.step.evaluate(batches[0]["x"])
        assert losses == pytest.approx(expected, abs=1e-12)
        assert_same_model(pair.model, pair.twin, 1e-12)


COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.7, 0.3, 1 / 3, 0.0])
def test_scalars_are_compared_as_a_tensor_is(dtype: torch.dtype, value: float) -> None:
    numbers = [value, 0.7, value + 1e-9, value - 1e-9, -1, 0, 1, True, 1e-300, 1e308, math.inf, -math.inf, math.nan]
    others = [torch.tensor(number, dtype=own) for number in numbers for own in (torch.float32, torch.float64)]
    others += [torch.tensor([0.2, value, 0.9]), torch.arange(3), torch.full((2, 1), value, dtype=torch.float64)]
    for shape in ((), (1,), (1, 1)):
        tensor = torch.full(shape, value, dtype=dtype)
        drawn = DrawnScalar(tensor.item(), shape, dtype)
        for compare in COMPARISONS:
            for number in numbers:
                assert bool(compare(drawn, number)) == bool(compare(tensor, number)), (compare, number)
            for other in others:
                assert torch.equal(compare(drawn, other), compare(tensor, other)), (compare, other)
                assert torch.equal(compare(other, drawn), compare(other, tensor)), (compare, other)


class ComparesScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("p", torch.tensor(0.6))
        self.register_buffer("wide", torch.tensor(0.4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers = [
            (torch.rand(()) < self.p) * 1.0,
            torch.where(torch.rand(1) < self.p, 1.0, 0.0),
            (torch.rand([]) <= self.wide) * 1.0,
            (self.p > torch.rand(1)) * 1.0,
            (torch.rand(()) < x[:, :1]) * 1.0,
        ]
        if torch.rand(()) < 0.5 and torch.rand(1) < math.inf and not torch.rand(1) > math.nan:
            x = self.layer(x)
        return self.layer(x) * sum(2.0**i * answer for i, answer in enumerate(answers))


@pytest.mark.slow
def test_answers_of_comparisons_with_tensors_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    target, batches = torch.zeros(5, 3), [torch.rand(5, 3) for _ in range(5)]
    with Twins(ComparesScalars(), partial(torch.optim.SGD, lr=0.0), F.mse_loss) as pair:
        torch.manual_seed(1)
        expected = [pair.plain(x, target=target).item() for x in batches]
        torch.manual_seed(1)
        losses = [pair.step(x, target=target).item() for x in batches]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "asked",
    [lambda: torch.rand([]), lambda: ~(torch.rand([]) < 0.5), lambda: (torch.rand(1) < 0.9) == (torch.rand(1) < 0.9)],
)
def test_a_scalar_that_does_more_than_decide_is_no_number(asked: Callable[[], Any]) -> None:
    model = Does(lambda y: (y if torch.rand([]) < 0.5 else 2 * y) * asked())
    refused = pytest.raises(CaptureError, match="MC2102")
    with compiled_step(model, F.mse_loss, capture="dynamo") as step, refused:
        step(torch.ones(4, 3), target=torch.zeros(4, 3))


def test_a_scalar_that_decides_is_a_tensor() -> None:
    def does(y: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(())
        decided = drawn < 2.0
        kinds = [isinstance(one, torch.Tensor) and isinstance(one, (torch.Tensor, int)) for one in (drawn, decided)]
        are_tensors = all(kinds) and torch.is_tensor(drawn) and torch.is_tensor(decided) and torch.is_tensor(y)
        is_other = isinstance(drawn, (float, nn.Parameter)) or isinstance(decided, bool) or torch.is_tensor(0.5)
        if decided and are_tensors and not is_other:
            return y
        return y + 100

    model = Does(does)
    expected = F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 3)).item()
    with compiled(model) as step:
        assert step(torch.ones(4, 3), target=torch.zeros(4, 3)).item() == pytest.approx(expected)


@pytest.mark.slow
def test_a_step_that_fails_leaves_the_generators_as_they_were() -> None:
    model = LeavesOutLayers()
    with compiled(model) as step:
        for x in (torch.ones(4, 3), torch.full((4, 3), 1e10)):
            before = states()
            if x[0, 0] == 1:
                step(x, target=torch.zeros(4, 3))
                assert states() != before
            else:
                with pytest.raises(ExecutionError, match="too large"):
                    step(x, target=torch.zeros(4, 3))
                assert states() == before


@pytest.mark.slow
def test_draws_that_cannot_be_the_same_for_all_replicas_are_refused() -> None:
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        r"(?s)MC2303: .*because dropout\(\) takes it as a number that does not change\n  fix:  torch\.rand": lambda y: (
            F.dropout(y, random.random())
        ),
        r"(?s)MC2303: .* draws other numbers .* for a shard of another size\n.*torch\.rand": lambda y: (
            y * sum(random.random() for _ in range(len(y)))
        ),
    }
    for text, does in cases.items():
        model, before = Does(does), states()
        with (
            compiled(model) as step,
            pytest.raises(CaptureError, match=text),
        ):
            step(torch.ones(5, 3), target=torch.zeros(5, 3))
        assert states() == before
