"""Observation of gradient clipping, however the clipping functions were imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType, FunctionType, GeneratorType
from typing import Any

import torch
from torch.nn import utils

Observer = Callable[[str, Sequence[torch.Tensor]], None]

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
"""Functions of `torch.nn.utils` that change the gradients of their parameters."""

_observer: list[Observer] = []


def observe_clipping(observer: Observer) -> None:
    """Calls ``observer`` with the function's name and parameters before all `CLIPPING`; it replaces an earlier observer.

    The functions stay the same objects, as user code may have imported them earlier.
    Each is a wrapper that calls the content of a closure cell, which is replaced.
    """
    _observer[:] = [observer]
    for name in CLIPPING:
        cell = _cell_of(getattr(utils, name, None))
        if cell is not None and not hasattr(cell.cell_contents, "tells_mirrorc"):
            cell.cell_contents = _told(name, cell.cell_contents)


def _cell_of(function: Any) -> CellType | None:
    """None if torch has changed its wrappers."""
    if not isinstance(function, FunctionType) or "func" not in function.__code__.co_freevars:
        return None
    cells: Sequence[CellType] = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index("func")]


def _told(name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    def told(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _observer[0](name, listed)
        is_generator = isinstance(parameters, GeneratorType)  # torch warns of an empty generator, not of a list
        return clip((parameter for parameter in listed) if is_generator else listed, *args, **kwargs)

    told.tells_mirrorc = True  # type: ignore[attr-defined]
    return told
