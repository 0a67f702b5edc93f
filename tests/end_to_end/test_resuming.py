"""A run that is saved and loaded goes on as one that was not interrupted, bit for bit."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.options.table import grouped


class RunningNorm(nn.Module):
    """Normalizes by statistics that forward updates first, so that a replica's own values decide its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.var.mul_(0.9).add_(x.var(0), alpha=0.1)
        return self.net((x - self.mean) * (self.var + 1e-5).rsqrt())


class Run:
    """A model with its optimizer and its step."""

    def __init__(self, num_devices: int, **options: Any) -> None:
        self.model = RunningNorm()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = {"loss_fn": F.cross_entropy, "backend": "eager", **options}
        self.step = mirrorc.compile(self.model, num_devices, optimizer=self.optimizer, **grouped(options))

    def train(self, *numbers: int) -> list[float]:
        """The losses of the batches of these numbers."""
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(16, 6, generator=generator) * torch.arange(1, 17)[:, None]
            losses.append(self.step(x, target=torch.randint(3, (16,), generator=generator)).item())
        return losses

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save({part: getattr(self, part).state_dict() for part in ("model", "optimizer", "step")}, file)
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state

    def load(self, state: dict[str, Any], *parts: str) -> None:
        for part in parts:
            getattr(self, part).load_state_dict(state[part])

    def bits(self) -> list[torch.Tensor]:
        replicas = [value for variable in self.step.variables.values() for value in variable.values]
        return [value.clone() for value in (*self.model.state_dict().values(), *replicas)]


PARTS = "model", "optimizer", "step"


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("parts", [PARTS, PARTS[::-1]], ids=["step last", "step first"])
@pytest.mark.parametrize("trains_before", [False, True], ids=["new step", "step that has run"])
def test_a_resumed_run_has_the_bits_of_one_in_one_go(
    num_devices: int, parts: tuple[str, ...], trains_before: bool
) -> None:
    whole, resumed = Run(num_devices), Run(num_devices)
    with whole.step, resumed.step, warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.train(0, 1, 2)
        state = whole.save()
        assert ("replica_buffers" in state["step"]) == (num_devices > 1)
        if trains_before:
            resumed.train(7, 8)
        resumed.load(state, *parts)
        assert resumed.train(3, 4) == whole.train(3, 4)
        assert all(map(torch.equal, resumed.bits(), whole.bits()))


def test_a_loaded_state_is_copied() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0, 1)
        state = whole.save()
        resumed.load(state, *PARTS)
        for buffer in state["step"]["replica_buffers"].values():
            for value in buffer["replicas"]:
                value.zero_()
        assert resumed.train(2) == whole.train(2)


class Pair:
    """Two steps with an optimizer each over one model."""

    def __init__(self) -> None:
        self.model = RunningNorm()
        optimizers = [torch.optim.SGD(self.model.net[layer].parameters(), lr=0.1) for layer in (0, 3)]
        options: Any = {"loss_fn": F.cross_entropy, "backend": "eager"}
        self.steps = [
            mirrorc.compile(self.model, 2, optimizer=optimizer, **grouped(options)) for optimizer in optimizers
        ]

    def train(self) -> list[float]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(8, 6, generator=generator) * torch.arange(1, 9)[:, None]
        return [step(x, target=torch.arange(8) % 3).item() for step in self.steps]


def test_two_steps_over_one_model_resume_without_a_warning() -> None:
    whole, resumed = Pair(), Pair()
    whole.train()
    states = copy.deepcopy([part.state_dict() for part in (whole.model, *whole.steps)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part, state in zip((resumed.model, *resumed.steps), states, strict=True):
            part.load_state_dict(state)
        for _ in range(2):
            assert resumed.train() == whole.train()
    for step in (*whole.steps, *resumed.steps):
        step.close()


def test_loaded_buffers_wait_for_a_training_call() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0, 1)
        state = whole.save()
        resumed.load(state, *PARTS)
        x, y = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
        for run in (whole, resumed):
            run.model.eval()
        assert torch.equal(resumed.step.evaluate(x, target=y), whole.step.evaluate(x, target=y))
        again = resumed.step.state_dict()["replica_buffers"]
        assert again.keys() == state["step"]["replica_buffers"].keys()
        for run in (whole, resumed):
            run.model.train()
        assert resumed.train(2) == whole.train(2)


def test_buffers_of_another_model_are_left_aside_with_a_warning() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0)
        resumed.load(whole.save(), "step")
        with pytest.warns(
            UserWarning, match="the model's buffers 'mean', 'var', .* differ from those of the checkpoint"
        ):
            resumed.train(1)
        assert not torch.equal(*resumed.step.variables["mean"].values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.train(2)


def test_a_state_for_other_numbers_of_devices_is_left_aside() -> None:
    whole, resumed = Run(2), Run(3)
    with whole.step, resumed.step:
        whole.train(0)
        resumed.load(whole.save(), *PARTS)
        resumed.train(1)
        assert len(resumed.step.variables["mean"].values) == 3


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ([1], TypeError, r"is a dict, as state_dict\(\) gives it, not \[1\]"),
        ({"mean": torch.zeros(6)}, TypeError, "'mean' in replica_buffers of a step's state is no such buffer"),
        ({"mean": {"model": 1, "replicas": []}}, TypeError, "is no such buffer: give what state_dict"),
        ({"mean": {"model": torch.ones(6), "replicas": [torch.ones(6)]}}, ValueError, "1 values for 2 replicas"),
        (
            {"x": {"model": torch.ones(6), "replicas": [torch.ones(6)] * 2}},
            ValueError,
            "'x' .* is no buffer of this model",
        ),
        ({"mean": {"model": torch.ones(6), "replicas": [torch.ones(5)] * 2}}, ValueError, r"another shape .*, \[6\]"),
    ],
)
def test_wrong_buffers_are_refused(buffers: Any, error: type[Exception], message: str) -> None:
    run = Run(2)
    with run.step:
        with pytest.raises(error, match=message):
            run.step.load_state_dict({**run.step.state_dict(), "replica_buffers": buffers})
        run.train(0)
