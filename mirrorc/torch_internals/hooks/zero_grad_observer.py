"""Observation of ``zero_grad`` of optimizers and modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Observer = Callable[[Sequence[torch.Tensor]], object]

_observer: list[Observer] = []


def observe_zero_grad(observer: Observer) -> None:
    """Calls ``observer`` with the parameters after a ``zero_grad`` of torch; it replaces an earlier observer.

    A subclass's ``zero_grad`` is observed only if it calls the base class's.
    """
    _observer[:] = [observer]
    for kind, parameters_of in ((torch.optim.Optimizer, _of_optimizer), (nn.Module, _of_module)):
        if not hasattr(kind.zero_grad, "tells_mirrorc"):
            kind.zero_grad = _told(kind.zero_grad, parameters_of)  # type: ignore[method-assign]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_module(module: nn.Module) -> list[torch.Tensor]:
    return list(module.parameters())


def _told(method: Callable[..., None], parameters_of: Callable[[Any], list[torch.Tensor]]) -> Callable[..., None]:
    @functools.wraps(method)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        for observer in _observer:
            observer(parameters_of(self))

    zero_grad.tells_mirrorc = True  # type: ignore[attr-defined]
    return zero_grad
