"""Tiny models with the features that training events work on, and losses that read Python state."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from parts import WAYS
from torch import nn

from fuzzed_training.python_features import PYTHON_FEATURES, by_python_features, prepare, sum_of_points

DROPOUT = "dropout"  # which no plain step can repeat
FEATURES = (
    "batch-norm",  # running statistics, with the count of batches
    "functional-norm",  # running statistics that nothing counts, where there is no batch-norm
    "peak",  # a buffer that is no linear function of the batch
    "tied",  # one parameter under two names
    "two-names",  # one module under two names
    "two-heads",  # programs that train different parameters
    "table",  # an embedding
    "parts",  # a weight that is a product of a parameter and of a part of another
    "python-state",  # forward reads attributes, containers, a class attribute and a global
    "fails",  # an operator that fails on some numbers
    "asserts",  # that the batch is finite
)
STATE_FEATURES = (
    "counter",  # which forward advances in a dict
    "cache",  # a tensor that the first forward leaves in an attribute
    "straight-through",  # an autograd.Function with a gradient of its own
)
POISON = 1e6  # what the operator that fails fails on
POISON_IN_BACKWARD = 1e5  # what its backward fails on

SCALE = 1.0  # read by forward and written by events, as a training script's global is


@torch.library.custom_op("mirrorc_fuzzing::fail_on_poison", mutates_args=())
def fail_on_poison(hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.abs().max() >= POISON:
        raise RuntimeError("poison in forward")
    return hidden.clone()


@torch.library.custom_op("mirrorc_fuzzing::fail_on_poison_backward", mutates_args=())
def fail_on_poison_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.abs().max() >= POISON_IN_BACKWARD:
        raise RuntimeError("poison in backward")
    return gradient.clone()


fail_on_poison.register_fake(lambda hidden, x: torch.empty_like(hidden))
fail_on_poison_backward.register_fake(lambda gradient, x: torch.empty_like(gradient))
fail_on_poison.register_autograd(
    lambda ctx, gradient: (fail_on_poison_backward(gradient, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class Peak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.peak.copy_(torch.maximum(self.peak, x.detach().abs().max()))
        return x / self.peak


class FunctionalNorm(nn.Module):
    """Batch normalization by the function, so that nothing but its values tells when its statistics are written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


class Tiny(nn.Module):
    gain = 1.0

    def __init__(self, features: frozenset[str]) -> None:
        super().__init__()
        self.has = {feature: feature in features for feature in (*FEATURES, *STATE_FEATURES, *PYTHON_FEATURES, DROPOUT)}
        is_normalized = not features.isdisjoint(("batch-norm", "functional-norm"))
        self.trunk = nn.Linear(3, 4, bias=not is_normalized)  # such a bias would have gradients of nothing but noise
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if "batch-norm" in features else nn.Identity()
        has_one = "functional-norm" in features and "batch-norm" not in features
        self.functional_norm = FunctionalNorm() if has_one else nn.Identity()
        self.peak = Peak() if "peak" in features else nn.Identity()
        if "tied" in features:
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.hidden.weight
        if "two-names" in features:
            self.again = self.hidden
        if "two-heads" in features:
            self.other_head = nn.Linear(4, 2)
        if "table" in features:
            self.table = nn.Embedding(5, 3)
        if "parts" in features:
            self.left, self.right = nn.Parameter(torch.randn(4, 12) / 3), nn.Parameter(torch.randn(12, 2))
            self.way = list(WAYS)[int(torch.randint(len(WAYS), ()))]
        self.slope, self.sign = 0.5, 0.0
        self.numbers, self.pair = {"shift": 0.25}, (0.5, -0.5)
        self.layers, self.settings = [1.0, 2.0], SimpleNamespace(temperature=1.0)
        self.kept: dict[str, Any] = {"calls": 0, "cached": None}
        self.register_buffer("scale", torch.tensor(1.0))
        prepare(self)

    def forward(
        self, x: torch.Tensor, words: torch.Tensor | None = None, head: str = "a", examples: Any = None
    ) -> torch.Tensor:
        if self.has["asserts"]:
            assert torch.isfinite(x).all(), 'the batch is "not" finite'
        if words is not None:
            x = x + self.table(words)
        if examples is not None:
            x = x + sum_of_points(examples)
        hidden = torch.tanh(self.functional_norm(self.norm(self.trunk(x))))
        if self.has["fails"]:
            hidden = fail_on_poison(hidden, x)
        if self.has[DROPOUT]:
            hidden = F.dropout(hidden, 0.4, self.training)
        hidden = self.peak(torch.tanh(self.hidden(hidden)))
        if self.has["tied"]:
            hidden = hidden + self.tied(hidden)
        if self.has["two-names"]:
            hidden = self.again(hidden)
        if self.has["parts"]:
            one, other = WAYS[self.way](self.right)
            hidden = torch.tanh(hidden + hidden @ (self.left @ one) + hidden @ other[:4])
        if self.has["python-state"]:
            hidden = self._by_python_state(hidden)
        hidden = by_python_features(self, self._by_kept_state(hidden))
        return (self.head if head == "a" else self.other_head)(hidden) * self.scale

    def _by_kept_state(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.has["counter"]:
            self.kept["calls"] += 1
            hidden = hidden * (1.0 + 0.1 * self.kept["calls"])
        if self.has["cache"]:
            if self.kept["cached"] is None:
                self.kept["cached"] = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
            hidden = hidden * self.kept["cached"]
        return StraightThrough.apply(hidden) if self.has["straight-through"] else hidden

    def _by_python_state(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.slope + self.numbers["shift"] + self.pair[0] * self.pair[1]
        hidden = hidden * type(self).gain * SCALE / self.settings.temperature
        return hidden + math.copysign(0.25, self.sign) + sum(self.layers) / len(self.layers)


def make_model(features: frozenset[str], seed: int) -> nn.Module:
    own_class = type("Tiny", (Tiny,), {})  # events write class attributes and methods
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = own_class(features).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(model: Tiny, num_examples: int, seed: int, head: str = "a") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(num_examples, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    batch: dict[str, Any] = {"x": x, "target": target}
    if model.has["table"]:
        batch["words"] = torch.randint(5, (num_examples,), generator=generator)
    if model.has["two-heads"]:
        batch["head"] = head
    if model.has["examples"]:
        numbers = torch.randint(1, 4, (num_examples,), generator=generator).tolist()
        batch["examples"] = [{"points": torch.randn(n, 3, generator=generator, dtype=torch.float64)} for n in numbers]
    return batch


class LossObject:
    def __init__(self) -> None:
        self.beta = 0.0
        self.options = {"power": 2}

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) + self.beta * output.abs().pow(self.options["power"]).mean()


class Teacher(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = frozen_layer(seed)
        self.register_buffer("shift", torch.full((2,), 0.25, dtype=torch.float64))

    def bent(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bent(self.layer(x)) + self.shift


def frozen_layer(seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)


class TaughtLoss:
    """A loss that compares with a teacher's output, too; events patch the teacher's class."""

    def __init__(self) -> None:
        self.kind = type("Teacher", (Teacher,), {})
        self.teacher = self.kind(0)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) + 0.5 * F.mse_loss(output, self.teacher(target))


class LossModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 0.5], dtype=torch.float64))
        self.beta = 0.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target).pow(2) * self.weight).mean() + self.beta * output.mean()


BETA = 0.0  # a global that a loss reads


def _loss_by_global(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) + BETA * output.abs().mean()


def _sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).sum() * 0.05


def _loss_by_closure() -> Callable[..., torch.Tensor]:
    warm, count = {"beta": 0.0}, 1

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * count + warm["beta"] * output.abs().mean()

    def set_count(value: int) -> None:
        nonlocal count
        count = value

    loss.warm, loss.set_count = warm, set_count  # type: ignore[attr-defined]  # for events
    return loss


LOSSES: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "mean": lambda: F.mse_loss,
    "sum": lambda: _sum_of_squares,
    "closure": _loss_by_closure,
    "global": lambda: _loss_by_global,
    "object": LossObject,
    "teacher": TaughtLoss,
    "module": LossModule,
}
