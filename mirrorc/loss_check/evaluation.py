"""Computes loss and gradients of a batch without side effects."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.weighted_means import WeightedMean, weighted_mean
from mirrorc.capture.eager.python_state import restored_state
from mirrorc.capture.model.model_state import ModelState
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import replaced_operators, schema_of


class ObservedCalls:
    """Calls that couple examples, in an evaluation of a loss.

    Attributes:
        weighted: means over targets, with the numbers of ignored and of all targets.
        unequal_draws: operators whose random numbers differ between runs.
    """

    def __init__(self, by_running_statistics: bool = False) -> None:
        self.num_batch_norms = 0
        self.weighted: list[tuple[WeightedMean, int, int]] = []
        self.unequal_draws: set[str] = set()
        self._by_running_statistics = by_running_statistics

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        observed = self

        class Watch(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return observed._call(func, args, kwargs or {})

        with Watch():
            yield

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mean = weighted_mean(function, args, kwargs)
        if mean is not None and isinstance(mean.target, torch.Tensor) and not mean.target.is_floating_point():
            left_out = int((mean.target == mean.ignore_index).sum())
            self.weighted.append((mean, left_out, mean.target.numel()))
        if function in _BATCH_NORMS:
            bound = _BATCH_NORMS[function].bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["training"]:
                self.num_batch_norms += 1
                if self._by_running_statistics:
                    _use_running_statistics(bound.arguments)
                    return function(*bound.args, **bound.kwargs)
        return function(*args, **kwargs)


_BATCH_NORMS = {F.batch_norm: inspect.signature(F.batch_norm)}


def _use_running_statistics(arguments: dict[str, Any]) -> None:
    x = arguments["input"]
    arguments["training"] = False
    if arguments["running_mean"] is None:
        arguments["running_mean"], arguments["running_var"] = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])


@dataclass(frozen=True)
class Evaluated:
    """Loss and gradients in 64 bits. ``scale`` is the loss's largest summand, in absolute value."""

    loss: float
    gradients: dict[str, torch.Tensor]
    scale: float
    observed: ObservedCalls = field(default_factory=ObservedCalls)


class Evaluation:
    """Evaluates batches of one structure, with equal random numbers for each example."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, call: Call) -> None:
        self._call = TrainingCall(model, loss_fn, call.structure, call.plain)
        parameters = ModelState(model, loss_fn).parameters
        self._trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._device = next(iter(self._trainable.values())).device
        self._draws = _EqualDraws()

    def run(self, leaves: Sequence[torch.Tensor], *, by_running_statistics: bool = False) -> Evaluated:
        """With ``by_running_statistics``, BatchNorm does not use the batch's statistics."""
        copies = [leaf.to(self._device, copy=True) for leaf in leaves]  # forward may write them
        observed = ObservedCalls(by_running_statistics)
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored_state(self._call))
            stack.enter_context(_restored_random_streams(self._device))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            _replace_buffers(self._call)
            with observed.watching(), self._draws.replacing():
                loss = self._call(*copies)
            if loss.numel() != 1 or not loss.requires_grad:
                raise problem(
                    ValueError,
                    f"MC2202: the loss is a tensor {list(loss.shape)}"
                    if loss.requires_grad
                    else "MC2202: the loss does not depend on the parameters",
                    "a step needs one number with a gradient",
                    "loss.mean()" if loss.requires_grad else "compute it without detach(), item() and torch.no_grad()",
                )
            computed = torch.autograd.grad(loss.reshape(()), list(self._trainable.values()), allow_unused=True)
        observed.unequal_draws = self._draws.unequal
        value = loss.item()
        gradients = {
            name: (torch.zeros_like(parameter) if gradient is None else gradient.to_dense()).detach().double()
            for (name, parameter), gradient in zip(self._trainable.items(), computed, strict=True)
        }
        return Evaluated(value, gradients, abs(value), observed)


def _replace_buffers(call: nn.Module) -> None:
    """`restored` removes the copies."""
    copies: dict[int, torch.Tensor] = {}
    for module in call.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


@contextlib.contextmanager
def _restored_random_streams(device: torch.device) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


_DRAWS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential", "exponential_", "geometric_", "log_normal_", "multinomial",
    "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
    "uniform", "uniform_",
)  # fmt: skip
"""ATen operators whose results are only random numbers."""


class _EqualDraws:
    """Gives every example in all runs the random numbers of the first example in the first run."""

    def __init__(self) -> None:
        self.unequal: set[str] = set()
        self._first: list[torch.Tensor] = []
        self._place = 0

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        self._place = 0
        with replaced_operators(self._replace):
            yield

    def _replace(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in operator.tags or not _draws_now(operator, args, kwargs):
            return NotImplemented
        if operator is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        drawn = operator(*args, **kwargs)
        if name not in _DRAWS or not isinstance(drawn, torch.Tensor):
            self.unequal.add(name)
            return drawn
        return self._made_equal(drawn, name)

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
        keep = 1.0 - p if train is not False else 1.0
        mask = self._made_equal(torch.empty_like(x, dtype=torch.bool).bernoulli_(keep), "native_dropout")
        return x * mask * (1.0 / keep if keep > 0.0 else 0.0), mask

    def _made_equal(self, drawn: torch.Tensor, name: str) -> torch.Tensor:
        example = drawn[0] if drawn.dim() and len(drawn) else drawn
        if self._place == len(self._first):
            self._first.append(example.clone())
        first = self._first[self._place]
        self._place += 1
        if first.shape == example.shape and first.dtype == example.dtype:
            drawn.copy_(first.expand_as(drawn))
        else:
            self.unequal.add(name)
        return drawn


def _draws_now(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention without dropout draws no random numbers."""
    arguments = schema_of(operator).arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    dropout = next((argument for argument in arguments if argument.name == "dropout_p"), None)
    return dropout is None or values.get("dropout_p", dropout.default_value) != 0.0
