"""Whatever is replaced, patched or hooked outside of the model between steps, the next step computes with it."""

import contextlib
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import train_step
from selections import exhaustive, slow
from torch import nn
from twins import compiled_step

outside: dict[str, Any] = {}  # what the loss finds in a global


def linear(seed: int) -> nn.Linear:
    layer = nn.Linear(3, 3).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


class World:
    """A model and a loss with a teacher and a helper, of classes of their own, so that patching them harms no other test."""

    def __init__(self) -> None:
        class Base(nn.Module):
            def features(self, x: torch.Tensor) -> torch.Tensor:
                return x * 0.75

        class Between(Base):
            pass

        class Teacher(Between):
            def __init__(self, seed: int) -> None:
                super().__init__()
                self.body = nn.Sequential(linear(seed), nn.Tanh())
                self.register_buffer("shift", torch.full((3,), 0.5, dtype=torch.float64))
                self.loose = [linear(seed + 1)]

            def features(self, x: torch.Tensor) -> torch.Tensor:
                return super().features(self.body(x))

            @torch.no_grad()
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.features(x) + self.shift + self.loose[0](x)

        class Helper:
            def method(self) -> float:
                return 1.0

            @staticmethod
            def static() -> float:
                return 1.5

            @classmethod
            def of_class(cls) -> float:
                return 0.5

            @property
            def by_property(self) -> float:
                return 1.25

        class Made:
            def __init__(self, factor: float) -> None:
                self.factor = factor

            def scaled(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.factor

        class Loss:
            def __init__(self) -> None:
                self.teacher = Teacher(0)
                self.helper = Helper()

            def compute(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                helper, wanted = self.helper, Made(0.5).scaled(self.teacher(target))
                factor = helper.method() * helper.static() * helper.of_class() * helper.by_property * Helper.of_class()
                return F.mse_loss(output * factor, wanted + outside["net"](target))

            def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return self.compute(output, target) + 0.1 * in_cell(output).square().mean()

        in_cell = linear(7)

        def replace_in_cell() -> None:
            nonlocal in_cell
            in_cell = linear(8)

        outside["net"] = linear(5)
        self.base, self.between, self.made, self.kind, self.helper = Base, Between, Made, Teacher, Helper
        self.loss, self.replace_in_cell = Loss(), replace_in_cell
        self.in_cell = lambda: in_cell
        self.model = nn.Sequential(linear(9).requires_grad_(True))

    @property
    def teacher(self) -> Any:
        return self.loss.teacher

    def replaced(self, seed: int) -> None:
        self.loss.teacher = self.kind(seed)

    def loaded(self) -> None:
        state = {name: value + 0.25 for name, value in self.teacher.state_dict().items()}
        self.teacher.load_state_dict(state, assign=True)


def twice(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2.0


def halved_input(module: nn.Module, given: Any) -> Any:
    return (given[0] * 0.5,)


def times(factor: float) -> Callable[..., torch.Tensor]:
    return lambda module, given, output: output * factor


def patched(kind: Any, name: str, value: Any) -> None:
    setattr(kind, name, value)


def no_longer_hooked(module: nn.Module) -> None:
    module._forward_hooks.clear()


def hooked_anew(module: nn.Module, *factors: float) -> None:
    no_longer_hooked(module)
    for factor in factors:
        module.register_forward_hook(times(factor))


def of_other_layers(world: World) -> None:
    old = world.teacher.body[0]
    new = nn.Linear(3, 3)
    new.weight, new.bias = old.weight, old.bias
    new.register_forward_hook(times(3.0))
    world.teacher.body[0] = new


class Shifted(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1.0


def of_another_class(layer: nn.Module) -> None:
    layer.__class__ = Shifted


CHANGES: dict[str, Callable[[World], object]] = {
    "another teacher": lambda w: w.replaced(3),
    "another module in a closure": lambda w: w.replace_in_cell(),
    "another module in a global": lambda w: outside.update(net=linear(6)),
    "another layer of the teacher": lambda w: w.teacher.body.__setitem__(0, linear(13)),
    "another layer in a plain list": lambda w: w.teacher.loose.__setitem__(0, linear(14)),
    "another parameter": lambda w: setattr(w.teacher.body[0], "weight", nn.Parameter(torch.eye(3).double(), False)),
    "another buffer": lambda w: setattr(w.teacher, "shift", torch.arange(3.0).double()),
    "a state that is assigned": lambda w: w.loaded(),
    "a parameter in place": lambda w: w.teacher.body[0].weight.mul_(0.5),
    "one layer more": lambda w: w.teacher.body.append(nn.Sigmoid()),
    "a hook on the teacher": lambda w: w.teacher.register_forward_hook(twice),
    "a hook on its input": lambda w: w.teacher.register_forward_pre_hook(halved_input),
    "a hook on its layer": lambda w: w.teacher.body[0].register_forward_hook(twice),
    "a hook on a layer in a list": lambda w: w.teacher.loose[0].register_forward_hook(times(3.0)),
    "one hook more": lambda w: w.teacher.loose[0].register_forward_hook(times(0.25)),
    "other hooks of the same code": lambda w: hooked_anew(w.teacher.loose[0], 0.25, 0.5),
    "hooks in another order": lambda w: (
        w.teacher.loose[0].register_forward_hook(lambda module, given, output: output + 1.0, prepend=True),
        w.teacher.loose[0]._forward_hooks.popitem(),
    ),
    "no hook": lambda w: no_longer_hooked(w.teacher.loose[0]),
    "a hook on a module in a closure": lambda w: w.in_cell().register_forward_hook(twice),
    "a hook on a module in a global": lambda w: outside["net"].register_forward_hook(twice),
    "a hooked layer with the same tensors": of_other_layers,
    "the teacher's own forward": lambda w: setattr(w.teacher, "forward", lambda x: x - 1.0),
    "the class's forward again": lambda w: delattr(w.teacher, "forward"),
    "the forward of its class": lambda w: patched(w.kind, "forward", lambda self, x: self.features(x) * 3.0),
    "another method of its class": lambda w: patched(w.kind, "features", lambda self, x: Shadowed.of(w.kind, self, x)),
    "a method that super() finds": lambda w: patched(w.base, "features", lambda self, x: x * 1.25),
    "a method that super() finds before": lambda w: patched(w.between, "features", lambda self, x: x * 1.75),
    "the layer's class": lambda w: of_another_class(w.teacher.body[0]),
    "a method of the helper": lambda w: patched(w.helper, "method", lambda self: 1.25),
    "a static method of the helper": lambda w: patched(w.helper, "static", staticmethod(lambda: 1.0)),
    "a class method of the helper": lambda w: patched(w.helper, "of_class", classmethod(lambda cls: 1.5)),
    "a property of the helper": lambda w: patched(w.helper, "by_property", property(lambda self: 0.75)),
    "the helper's own method": lambda w: setattr(w.loss.helper, "method", lambda: 0.75),
    "a method of what the loss makes": lambda w: patched(w.made, "scaled", lambda self, x: x + self.factor),
    "a method of the loss": lambda w: patched(type(w.loss), "compute", lambda self, o, t: F.mse_loss(o, t)),
    "the call of the loss": lambda w: patched(type(w.loss), "__call__", lambda self, o, t: F.l1_loss(o, t)),
}


class Shadowed:
    @staticmethod
    def of(kind: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
        return super(kind, module).features(module.body(x)) * 2.0


def train(devices: int, num_examples: int = 4) -> dict[str, float]:
    with torch.random.fork_rng(), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        world = World()
        optimizer = torch.optim.SGD(world.model.parameters(), lr=1e-6)
        x, target = (torch.randn(num_examples, 3, dtype=torch.float64) for _ in range(2))
        step: Any = functools.partial(plain_step, world.model, optimizer, world.loss)
        if devices:
            step = stack.enter_context(compiled_step(world.model, world.loss, devices, optimizer=optimizer))
            stack.enter_context(pytest.warns(UserWarning, match="the step was compiled 8 times"))
        losses = {"nothing": float(step(x, target=target))}
        for name, change in CHANGES.items():
            with torch.no_grad():
                change(world)
            losses[name] = float(step(x, target=target))
        return losses


def plain_step(model: nn.Module, optimizer: Any, loss_fn: Any, x: torch.Tensor, target: torch.Tensor) -> float:
    return train_step(model, optimizer, {"input": x, "target": target}, loss_fn)


@pytest.mark.fast
@pytest.mark.parametrize("devices", [*slow((2,)), *exhaustive((1,))])
def test_what_changes_outside_of_the_model_is_seen_by_the_next_step(devices: int) -> None:
    expected = train(0)
    same = [name for (_, a), (name, b) in pairwise(expected.items()) if abs(a - b) < 1e-3]
    assert not same, f"changes that change nothing: {same}"
    found = train(devices)
    wrong = [
        f"{name}: {found[name]}, plain PyTorch {loss}"
        for name, loss in expected.items()
        if found[name] != pytest.approx(loss, rel=1e-9)
    ]
    assert not wrong, "\n".join(wrong)
