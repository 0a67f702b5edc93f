"""A model that a step trains, and its twin in a plain loop on one device: call for call they are the same."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_mirrored, assert_same_model, assert_same_state
from tiny_models import make_mlp, mlp_batch
from tiny_programs import TwoLayers
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.options.table import grouped


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def compiled_step(model: nn.Module, loss_fn: Any = None, devices: Any = 2, optimizer: Any = sgd, **options: Any) -> Any:
    """A step on eager devices; ``optimizer`` may be a function of the model's parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer | list | None):
        optimizer = optimizer(model.parameters())
    options = {"backend": "eager", **options}
    return mirrorc.compile(model, devices, optimizer=optimizer, loss_fn=loss_fn, **grouped(options))


def same_each_time(make: Callable[[], Any]) -> Any:
    """What a function makes by random numbers that begin alike."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def make_net(*between: nn.Module) -> nn.Module:
    """Two layers, of six features and of three."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), *between, nn.Tanh(), nn.Linear(5, 3)).double()


def layers_of_odd_sizes() -> nn.Module:
    """Three layers, of seven features and of three."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches_of(
    *sizes: int, features: int = 6, classes: int = 0, outputs: int = 0, name: str = "x"
) -> list[dict[str, torch.Tensor]]:
    """A batch of each size: features, with a class or several numbers as the target."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        x = torch.randn(size, features, generator=generator, dtype=torch.float64)
        numbers = torch.randn(size, outputs, generator=generator, dtype=torch.float64)
        target = numbers if outputs else torch.randint(classes, (size,), generator=generator)
        found.append({name: x, "target": target})
    return found


class Twins:
    """A model under a step, and its copy in plain PyTorch.

    Args:
        make_optimizer: of the parameters that ``select`` gives, for each of both.
        model: changed by the step; the twin is a copy of it.
        tolerance: of losses, parameters and optimizer state.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        loss_fn: Any = None,
        devices: Any = 2,
        *,
        select: Callable[[Any], Iterable[Any]] = lambda model: model.parameters(),
        tolerance: float = 1e-10,
        **options: Any,
    ) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.optimizer, self.twin_optimizer = (make_optimizer(select(m)) for m in (self.model, self.twin))
        self.loss_fn, self.tolerance = loss_fn, tolerance
        self.step = compiled_step(self.model, loss_fn, devices, self.optimizer, **options)

    def __enter__(self) -> "Twins":
        return self

    def __exit__(self, *_: object) -> None:
        self.step.close()

    @property
    def sides(self) -> tuple[tuple[Any, torch.optim.Optimizer], ...]:
        """Both models with their optimizers, for what the user does to either."""
        return (self.model, self.optimizer), (self.twin, self.twin_optimizer)

    def on_both(self, change: Callable[[Any, torch.optim.Optimizer], Any]) -> None:
        """Makes a change to both."""
        for model, optimizer in self.sides:
            change(model, optimizer)

    def backward(self, *args: Any, loss_scale: float = 1.0, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of the twin, which adds to its gradients; gives the loss."""
        target = (kwargs.pop("target"),) if self.loss_fn is not None else ()
        output = self.twin(*args, **kwargs)
        loss = self.loss_fn(output, *target) if self.loss_fn is not None else output
        if not isinstance(loss, torch.Tensor):
            loss = loss["loss"] if isinstance(loss, dict) else loss.loss
        (loss * loss_scale).backward()
        return loss.detach()

    def update(self) -> None:
        """The twin's optimizer steps, and drops the gradients."""
        self.twin_optimizer.step()
        self.twin_optimizer.zero_grad()

    def plain(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A step of the twin."""
        self.twin_optimizer.zero_grad()
        loss = self.backward(*args, **kwargs)
        self.update()
        return loss

    def train(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A step of both, whose losses agree."""
        loss = self.step(*args, **kwargs)
        expected = self.plain(*args, **kwargs)
        assert loss.item() == pytest.approx(expected.item(), rel=self.tolerance), f"{loss} is not {expected}"
        return loss  # type: ignore[no-any-return]

    def check(self) -> None:
        """Models and optimizer state agree."""
        assert_same_model(self.model, self.twin, self.tolerance)
        assert_same_state(self.optimizer, self.twin_optimizer, self.tolerance)


class MlpTwins(Twins):
    """The MLP of `tiny_models`, or another model for its batches; each batch is another one."""

    def __init__(
        self,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        devices: int = 2,
        *,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        model = make_mlp() if model is None else model
        super().__init__(model, make_optimizer, F.cross_entropy, devices, **options)
        self.devices, self.seed = devices, 0

    def next_batch(self) -> dict[str, torch.Tensor]:
        """Six examples."""
        self.seed += 1
        return mlp_batch(6, seed=self.seed)

    def steps(self, count: int = 2) -> None:
        """Trains both, whose losses agree; all replicas hold the model's bits."""
        for _ in range(count):
            self.train(**self.next_batch())
            assert_mirrored(self.step, self.model, self.devices)


def trained_two_layers(num_devices: int, **options: Any) -> tuple[Any, torch.Tensor]:
    """A step over two layers after three batches of seven, and all parameters in one tensor."""
    torch.manual_seed(0)
    model = TwoLayers().double()
    adamw = partial(torch.optim.AdamW, lr=0.1)
    step = compiled_step(model, F.cross_entropy, num_devices, adamw, **options)
    for _ in range(3):
        step(torch.randn(7, 4, dtype=torch.float64), target=torch.arange(7) % 3)
    return step, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
