"""Forward decides by numbers that Python or numpy draw: a step draws them once for all replicas, as one device would."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from references import assert_same_model, train_step
from selections import slow
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.capture.deciding_draws import DrawnScalar
from mirrorc.errors import CaptureError, ExecutionError

SGD = {"lr": 0.1, "momentum": 0.9}


class LeavesOutLayers(nn.Module):
    """Runs some of its layers, and scales what they give."""

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
    """A layer, and then what is given."""

    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, 3), does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self.layer(x))


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    return mirrorc.compile(
        model, num_devices, optimizer=optimizer, loss_fn=F.mse_loss, **{"backend": "eager", **options}
    )


def seed_all() -> None:
    random.seed(5)
    np.random.seed(6)


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize(("num_devices", "backend"), [(2, "eager"), *slow((1, "eager"), (4, "eager"), (2, "inductor"))])
def test_layers_are_left_out_as_on_one_device(num_devices: int, backend: str) -> None:
    torch.manual_seed(0)
    model = LeavesOutLayers().double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(own.parameters(), **SGD) for own in (model, twin)]
    batches = [
        {"x": torch.randn(5, 3, dtype=torch.float64), "target": torch.zeros(5, 3, dtype=torch.float64)}
        for _ in range(9)
    ]
    seed_all()
    expected = [float(train_step(twin, optimizers[1], batch, F.mse_loss)) for batch in batches]
    wanted = states()
    seed_all()
    with compiled(model, optimizers[0], num_devices, backend=backend) as step:
        losses = [float(step(**batch)) for batch in batches]
        assert states() == wanted
        assert repr(step).endswith("4 compiled programs>"), "each way through two layers is one"
        model.eval()
        step.evaluate(batches[0]["x"])
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-12
    assert_same_model(model, twin, 1e-12)


@pytest.mark.parametrize(
    ("narrow", "bound", "value"), [(True, 0.7, 0.7), (True, 0.3, 0.3), (True, 1 / 3, 1 / 3), (False, 0.7, 0.7)]
)
def test_numbers_are_compared_as_a_tensor_is(narrow: bool, bound: float, value: float) -> None:
    tensor = torch.tensor(value, dtype=torch.float32 if narrow else torch.float64)
    drawn = DrawnScalar(tensor.item(), narrow)
    asked = [(one < bound, one <= bound, one > bound, one >= bound) for one in (drawn, tensor)]
    assert list(asked[0]) == [bool(answer) for answer in asked[1]]


def test_a_scalar_that_does_more_than_decide_is_no_number() -> None:
    model = Does(lambda y: (y if torch.rand([]) < 0.5 else 2 * y) * torch.rand([]))
    refused = pytest.raises(CaptureError, match="cannot branch on tensor values")
    with compiled(model, torch.optim.SGD(model.parameters(), **SGD)) as step, refused:
        step(torch.ones(4, 3), target=torch.zeros(4, 3))


def test_a_step_that_fails_leaves_the_generators_as_they_were() -> None:
    model = LeavesOutLayers()
    with compiled(model, torch.optim.SGD(model.parameters(), **SGD)) as step:
        for x in (torch.ones(4, 3), torch.full((4, 3), 1e10)):
            before = states()
            if x[0, 0] == 1:
                step(x, target=torch.zeros(4, 3))
                assert states() != before
            else:
                with pytest.raises(ExecutionError, match="too large"):
                    step(x, target=torch.zeros(4, 3))
                assert states() == before


def test_draws_that_cannot_be_the_same_for_all_replicas_are_refused() -> None:
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        r"because .*takes it as a number that does not change.*torch\.rand": lambda y: F.dropout(y, random.random()),
        "draws other numbers .* for a shard of another size.*torch.rand": lambda y: (
            y * sum(random.random() for _ in range(len(y)))
        ),
    }
    for text, does in cases.items():
        model, before = Does(does), states()
        with (
            compiled(model, torch.optim.SGD(model.parameters(), **SGD)) as step,
            pytest.raises(CaptureError, match=text),
        ):
            step(torch.ones(5, 3), target=torch.zeros(5, 3))
        assert states() == before
