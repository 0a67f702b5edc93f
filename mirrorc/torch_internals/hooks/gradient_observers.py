"""Observes gradient clipping and ``zero_grad``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import nn
from torch.nn import utils

ClippingObserver = Callable[[str, Sequence[torch.Tensor]], None]
ZeroGradObserver = Callable[[Sequence[torch.Tensor]], object]

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_of_clipping: list[ClippingObserver] = []
_of_zero_grad: list[ZeroGradObserver] = []


def observe_clipping(observer: ClippingObserver) -> None:
    """Calls ``observer(name, parameters)`` before each call of a function in `CLIPPING`.

    Replaces the function inside torch's wrapper, because user code may have imported the wrapper.
    """
    _of_clipping[:] = [observer]
    for name in CLIPPING:
        cell = _cell_of(getattr(utils, name, None))
        if cell is not None and not hasattr(cell.cell_contents, "tells_mirrorc"):
            cell.cell_contents = _observed_clipping(name, cell.cell_contents)


def _cell_of(function: Any) -> CellType | None:
    """None if torch has changed its wrappers."""
    if not isinstance(function, FunctionType) or "func" not in function.__code__.co_freevars:
        return None
    cells: Sequence[CellType] = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index("func")]


def _observed_clipping(name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    def clip_observed(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _of_clipping[0](name, listed)
        is_generator = isinstance(parameters, GeneratorType)  # torch warns of an empty generator, not of a list
        return clip((parameter for parameter in listed) if is_generator else listed, *args, **kwargs)

    clip_observed.tells_mirrorc = True  # type: ignore[attr-defined]
    return clip_observed


def observe_zero_grad(observer: ZeroGradObserver) -> None:
    """Calls ``observer`` with the parameters after torch's ``zero_grad``; a subclass may bypass it."""
    _of_zero_grad[:] = [observer]
    for kind, parameters_of in _PARAMETERS_OF.items():
        if not hasattr(kind.zero_grad, "tells_mirrorc"):
            kind.zero_grad = _observed_zero_grad(kind.zero_grad, parameters_of)


_PARAMETERS_OF: dict[Any, Callable[[Any], list[torch.Tensor]]] = {
    torch.optim.Optimizer: lambda optimizer: [p for group in optimizer.param_groups for p in group["params"]],
    nn.Module: lambda module: list(module.parameters()),
}


def _observed_zero_grad(
    method: Callable[..., None], parameters_of: Callable[[Any], list[torch.Tensor]]
) -> Callable[..., None]:
    @functools.wraps(method)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        for observer in _of_zero_grad:
            observer(parameters_of(self))

    zero_grad.tells_mirrorc = True  # type: ignore[attr-defined]
    return zero_grad
