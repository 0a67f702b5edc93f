"""Whatever Python reads in forward and loss may change between steps: the next step computes with what is there then."""

import contextlib
import functools
import itertools
import math
import os
import threading
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import train_step, unchanged
from small_modules import Parts, module_of
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from twins import compiled_step

import mirrorc
from mirrorc import CaptureError

warm = {"beta": 0.0}
scale = 0.5
weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


array = np.array([1.0, 2.0, 0.5])


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


class Config:
    power = 2.0
    zero = 0.0

    def __init__(self) -> None:
        self.factor = 2.0
        self.factors = [1.0, 2.0]
        self.nested = types.SimpleNamespace(offset=0.5)


class Layer(nn.Module):
    gain = 1.5

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config = config
        self.sizes = (1.0, 2.0)
        self.table = {"a": 1.0}
        self.zero = 0.0
        self.chosen = [weights.clone()]

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        y = (
            activation(self.linear(x))
            * self.gain
            * config.factor
            * config.power
            * config.factors[0]
            * self.sizes[0]
            * self.table["a"]
        )
        y = self.shifted(y) * weights * self.chosen[0] + config.nested.offset
        y = y * torch.from_numpy(array)
        return y * scale + math.copysign(1.0, self.zero) + 2.0 * math.copysign(1.0, config.zero)


class Loss:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.weight + warm["beta"] * output.square().mean()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    module, classes = globals(), (Config, Layer, nn.Linear)
    names = ("scale", "weights", "activation", "array")
    values = {name: module[name] for name in names}
    attributes = [dict(vars(c)) for c in classes]
    try:
        yield
    finally:
        module.update(values)
        warm["beta"] = 0.0
        for c, before in zip(classes, attributes, strict=True):
            for name, value in before.items():
                if vars(c)[name] is not value:
                    setattr(c, name, value)


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def own_forward(model: Layer) -> None:
    model.forward = types.MethodType(lambda self, x: self.linear(x), model)  # type: ignore[method-assign]


def scaled_forward(factor: float) -> Callable[[Layer, torch.Tensor], torch.Tensor]:
    return lambda self, x: self.linear(x) * factor


CHANGES: dict[str, Callable[[Layer, Loss], object]] = {
    "a value in a global dict": lambda m, loss: warm.update(beta=1.0),
    "a global number": lambda m, loss: set_global("scale", 2.0),
    "a global tensor": lambda m, loss: set_global("weights", torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)),
    "a global tensor in place": lambda m, loss: weights.mul_(2.0).sub_(0.5),
    "a global array": lambda m, loss: set_global("array", np.array([0.5, 1.0, 1.0])),
    "a global function": lambda m, loss: set_global("activation", torch.sigmoid),
    "an attribute of the loss": lambda m, loss: setattr(loss, "weight", 3.0),
    "an attribute of the class": lambda m, loss: setattr(Layer, "gain", 1.0),
    "an attribute of the configuration": lambda m, loss: setattr(m.config, "factor", 1.0),
    "an attribute of the configuration's class": lambda m, loss: setattr(Config, "power", 1.5),
    "a nested configuration": lambda m, loss: setattr(m.config.nested, "offset", 1.0),
    "another nested configuration": lambda m, loss: setattr(m.config, "nested", types.SimpleNamespace(offset=2.0)),
    "a list": lambda m, loss: m.config.factors.__setitem__(0, 0.5),
    "a dict": lambda m, loss: m.table.update(a=0.5),
    "a tuple": lambda m, loss: setattr(m, "sizes", (0.5, 2.0)),
    "a tensor in a list": lambda m, loss: m.chosen.__setitem__(0, torch.ones(3, dtype=torch.float64)),
    "a negative zero of the model": lambda m, loss: setattr(m, "zero", -0.0),
    "a negative zero of the configuration": lambda m, loss: setattr(m.config, "zero", -0.0),
    "another method": lambda m, loss: setattr(Layer, "shifted", lambda self, x: x - 1.0),
    "a submodule's class": lambda m, loss: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
    "a hook": lambda m, loss: m.linear.register_forward_hook(lambda module, given, output: output * 2.0),
    "the class's forward": lambda m, loss: setattr(Layer, "forward", scaled_forward(2.0)),
    "the class's forward, of the same code": lambda m, loss: setattr(Layer, "forward", scaled_forward(3.0)),
    "the model's forward": lambda m, loss: own_forward(m),
}


def plain_step(model: nn.Module, optimizer: Any, loss_fn: Any, x: torch.Tensor, target: torch.Tensor) -> float:
    return train_step(model, optimizer, {"x": x, "target": target}, loss_fn)


def train(devices: int, num_examples: int) -> dict[str, float]:
    with kept(), torch.random.fork_rng(), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        set_global("weights", weights.clone())
        model, loss_fn = Layer(Config()).double(), Loss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        step: Any = functools.partial(plain_step, model, optimizer, loss_fn)
        if devices:
            step = stack.enter_context(compiled_step(model, loss_fn, devices, optimizer=optimizer))
            stack.enter_context(pytest.warns(UserWarning, match="the step was compiled 8 times"))
        x, target = (torch.randn(num_examples, 3, dtype=torch.float64) for _ in range(2))
        losses = {"nothing": float(step(x, target=target))}
        for name, change in CHANGES.items():
            change(model, loss_fn)
            losses[name] = float(step(x, target=target))
        return losses


@pytest.mark.parametrize(("num_devices", "num_examples"), [(1, 4), (2, 5)])
def test_what_changes_is_seen_by_the_next_step(num_devices: int, num_examples: int) -> None:
    expected, found = train(0, num_examples), train(num_devices, num_examples)
    assert all(abs(a - b) > 1e-2 for a, b in pairwise(expected.values())), "a change that changes nothing"
    assert found == pytest.approx(expected, rel=1e-9)


def compiled(model: nn.Module, loss_fn: Any = F.mse_loss, capture: str = "auto") -> mirrorc.Step:
    return compiled_step(model, loss_fn, capture=capture)


def batch(num_examples: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(num_examples, 3), "target": torch.zeros(num_examples, 3)}


def test_values_that_come_back_are_not_compiled_again() -> None:
    with kept(), compiled(nn.Linear(3, 3), Loss()) as step:
        programs = []
        for beta in (False, True, False, True):
            warm["beta"] = beta
            step(batch()["x"], target=batch()["target"])
            programs.append(step.programs[-1])
        assert programs[0] is programs[2] and programs[1] is programs[3] and programs[0] is not programs[1]


@pytest.mark.fast
def test_what_no_graph_depends_on_compiles_nothing_again() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model.best = float("nan")
    first, threads = batch(), torch.get_num_threads()
    with compiled(model) as step:
        step(first["x"], target=first["target"])
        program = step.programs[-1]
        same = torch.zeros(4, 3)
        model.best = float("nan")
        try:
            torch.set_num_threads(threads + 1)
            with torch.no_grad():
                step(same, target=same)
        finally:
            torch.set_num_threads(threads)
        model[0].weight.data = torch.ones(3, 3)
        model[0].weight.grad = torch.ones(3, 3)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=False)
        in_thread = threading.Thread(target=lambda: step(same, target=same))
        in_thread.start(), in_thread.join()
        half = same[:2]
        step(mirrorc.PerReplica([half, half]), target=mirrorc.PerReplica([half, half]))  # one tensor in four places
        assert step.programs[-1] is program


class Reading(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * next_number.value


class _NextNumber:
    def __init__(self) -> None:
        self.counter = itertools.count(1)

    def __getattribute__(self, name: str) -> Any:
        counter = object.__getattribute__(self, "counter")
        return float(next(counter)) if name == "value" else counter


next_number = _NextNumber()


@pytest.mark.fast
def test_what_changes_whenever_it_is_read_is_an_error_and_not_compiled_in_every_step() -> None:
    model = Reading()
    given = compiled(model, capture="dynamo")
    with given as step, unchanged(model), pytest.raises(CaptureError, match=r"(?s)Reading.*next_number"):
        step(batch()["x"], target=batch()["target"])


def test_plain_arguments_differ_by_the_sign_of_zero_and_agree_in_nan() -> None:
    model = module_of(
        lambda self, x, number: self.layer(x).sum() * 0 + (math.copysign(1.0, number) if number == number else 5.0),
        layer=nn.Linear(3, 3),
    )
    with compiled_step(model) as step:
        assert [step(torch.ones(4, 3), number).item() for number in (0.0, -0.0, 0.0)] == [1.0, -1.0, 1.0]
        assert step(torch.ones(4, 3), float("nan")).item() == 5.0
        program = step.programs[-1]
        step(torch.ones(4, 3), float("nan"))
        assert step.programs[-1] is program


READS: dict[str, Callable[[], float]] = {
    "os.getenv": lambda: float(os.getenv("MIRRORC_TEST_BETA", "1.5")),
    "membership": lambda: 2.0 if "MIRRORC_TEST_BETA" in os.environ else 3.0,
    "os.environ.get": lambda: float(os.environ.get("MIRRORC_TEST_BETA", "1.5")),
}


def test_the_environment_is_seen_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    still = functools.partial(torch.optim.SGD, lr=0.0)
    for name, read in READS.items():
        monkeypatch.delenv("MIRRORC_TEST_BETA", raising=False)
        model = nn.Linear(3, 1).double()
        loss_fn = lambda y, t, read=read: F.mse_loss(y, t) * read()  # noqa: E731
        with compiled_step(model, loss_fn, optimizer=still, capture="dynamo") as step:
            for value in (None, None, "2.5", "3.5", "3.5", None):
                if value is None:
                    monkeypatch.delenv("MIRRORC_TEST_BETA", raising=False)
                else:
                    monkeypatch.setenv("MIRRORC_TEST_BETA", value)
                expected = F.mse_loss(model(x), target).item() * read()
                assert abs(step(x, target=target).item() - expected) < 1e-12, f"{name}, {value}"


def test_a_hook_on_all_modules_is_seen() -> None:
    model = nn.Linear(3, 3)
    with compiled(model) as step:
        before = step(batch()["x"], target=batch()["target"])
        handle = register_module_forward_hook(lambda module, given, output: output * 0)
        try:
            assert step(batch()["x"], target=batch()["target"]).item() == 0 != before.item()
        finally:
            handle.remove()


class Members(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 3), gain=nn.Parameter(torch.ones(3)))
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh() * self.gain + self.offset


@pytest.mark.fast
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("name", ["layer", "gain", "offset"])
def test_an_attribute_that_hides_a_member_is_refused_until_it_is_gone(name: str, capture: str) -> None:
    model = nn.Sequential(Members())
    hidden = f"MC1206: .*hides the model's (submodule|parameter|buffer) '0.{name}'"
    values = {"layer": nn.Linear(3, 3), "gain": torch.full((3,), 2.0), "offset": torch.full((3,), 5.0)}
    object.__setattr__(model[0], name, values[name])
    with pytest.raises(ValueError, match=hidden):
        compiled(model, capture=capture)
    vars(model[0]).pop(name)
    given = batch()
    with compiled(model, capture=capture) as step:
        step(given["x"], target=given["target"])
        vars(model[0])[name] = values[name]
        for _ in range(2):
            with unchanged(model), pytest.raises(ValueError, match=hidden):
                step(given["x"], target=given["target"])
        vars(model[0]).pop(name)
        expected = F.mse_loss(model(given["x"]), given["target"])
        torch.testing.assert_close(step(given["x"], target=given["target"]), expected.detach())
