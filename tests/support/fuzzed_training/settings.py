"""What a run begins with: model, loss, optimizer, and how its step is compiled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import mirrorc
from fuzzed_training.plans import AS_THEY_ARE, Plans
from mirrorc.options.table import grouped
from mirrorc.passes import ChooseCheckpoints, default_pipeline

OptimizerMaker = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                moment = state.setdefault("moment", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(torch.tanh(10 * moment), alpha=group["lr"])


OPTIMIZERS: dict[str, OptimizerMaker] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam-foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.003, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.02),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "lion": partial(Lion, lr=0.01),
}


OPTIONAL_PASSES = ("share-parameters", "schedule-overlap", "place-gradients", "factor-gradients")


@dataclass(frozen=True)
class Distribution:
    num_devices: int = 2
    link: str | None = None
    left_out: tuple[str, ...] = ()
    bucket_bytes: int = 2**20
    factors: bool = False
    exact_order: bool = False
    is_checked: bool = False
    microbatches: int = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    recomputes: bool = False
    plans: Plans = AS_THEY_ARE

    def compile(self, model: nn.Module, **options: Any) -> mirrorc.Step:
        passes = default_pipeline(
            **self.plans.of_pipeline(self.bucket_bytes),
            link=self.link,
            min_factored_elements=0 if self.factors else 2**17,
            check_finite=self.is_checked,
            microbatches=self.microbatches,
            max_grad_norm=self.max_grad_norm,
            max_grad_value=self.max_grad_value,
        )
        return mirrorc.compile(
            model,
            self.num_devices,
            microbatches=self.microbatches,
            **grouped(
                {
                    "backend": "eager",
                    "passes": passes,
                    "add": [mirrorc.before("recompute-checkpoints", ChooseCheckpoints(0))] if self.recomputes else [],
                    "disable": [name for name in self.left_out if any(one.name == name for one in passes)],
                    "exchange": self.plans.exchange,
                    "exact_order": self.exact_order,
                    "check_replicas_every": int(self.is_checked),
                    "timeout": 60.0,
                    **options,
                }
            ),
        )


def has_factors(left_out: Sequence[str], exact_order: bool) -> bool:
    """Whether gradients may be left as factors."""
    return not exact_order and "factor-gradients" not in left_out


MICROBATCHES = (1, 1, 1, 2, 3)
MAX_GRAD_NORMS = (None, None, None, 0.1, 10.0, math.inf)
MAX_GRAD_VALUES = (None, None, None, None, 0.05)


@dataclass(frozen=True)
class Setting:
    """What a run begins with.

    Attributes:
        holds_all: whether the optimizer holds all parameters from the beginning, otherwise the heads' only.
        is_repeated: whether the other side is trained by mirrorc, too, in the same way: then the bits are compared.
    """

    features: tuple[str, ...] = ()
    loss: str = "mean"
    optimizer: str = "adam"
    distribution: Distribution = Distribution()
    holds_all: bool = True
    is_uneven: bool = False
    is_repeated: bool = False
    seed: int = 0
