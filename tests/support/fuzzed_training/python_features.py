"""Features of a model that work on Python objects; where a step refuses such a model, the run ends there."""

from collections import deque
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import nn

PYTHON_FEATURES = (
    "examples",  # an argument that is a list of dicts, an item for each example
    "tensor-hook",  # which forward registers on a value
    "node-hook",  # which forward registers on the function of a value
    "iterator",  # that forward takes the next number of
    "queue",  # that forward takes a number from
    "numpy",  # a number of numpy, as an attribute
    "generated-code",  # a function that is made of a string
    "bank",  # a buffer of which forward writes rows by index
)

_SOURCE = """
def bend(hidden, factor):
    return hidden.sin() * factor + hidden
"""


def prepare(model: Any) -> None:
    """Gives a model what its features need."""
    names: dict[str, Any] = {}
    exec(_SOURCE, names)
    model.bend, model.factor = names["bend"], np.float64(0.75)
    model.kept.update(iterator=cycle((0.5, 1.0, 1.5)), queue=deque((0.5, 1.0, 1.5) * 100))
    if model.has["bank"]:
        model.register_buffer("bank", torch.zeros(3, 4))


def by_python_features(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden values, changed by each feature that the model has."""
    for name, function in _FUNCTIONS.items():
        hidden = function(model, hidden) if model.has[name] else hidden
    return hidden


def sum_of_points(examples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([example["points"].sum(0) for example in examples])


def _tensor_hook(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 1.5
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 0.5)
    return hidden


def _node_hook(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 1.5
    if hidden.grad_fn is not None:
        hidden.grad_fn.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    return hidden


def _bank(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    if model.training:
        with torch.no_grad():
            model.bank[(hidden[:, 0] > 0).long()] = hidden.detach().abs().mean(0)
    return hidden + model.bank.mean(0)


_FUNCTIONS: dict[str, Any] = {
    "tensor-hook": _tensor_hook,
    "node-hook": _node_hook,
    "iterator": lambda model, hidden: hidden * next(model.kept["iterator"]),
    "queue": lambda model, hidden: hidden * model.kept["queue"].popleft(),
    "numpy": lambda model, hidden: hidden * model.factor,
    "generated-code": lambda model, hidden: model.bend(hidden, model.factor),
    "bank": _bank,
}
