"""Tells who clips gradients, however the clipping functions were imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType, FunctionType, GeneratorType
from typing import Any

import torch
from torch.nn import utils

Observer = Callable[[str, Sequence[torch.Tensor]], None]

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
"""Functions of `torch.nn.utils` that change the gradients of the parameters that they are given."""

_observer: list[Observer] = []


def observe_clipping(observer: Observer) -> None:
    """Has a function told of every call of a function in `CLIPPING`, before the call is carried out.

    These functions may have been imported anywhere before, so they stay the same objects. Each is a wrapper, which calls what it
    finds in a cell of its closure; the content of that cell is replaced.

    Args:
        observer: takes the name of the function and the parameters that it was given; takes the place of an earlier observer.
    """
    _observer[:] = [observer]
    for name in CLIPPING:
        cell = _cell_of(getattr(utils, name, None))
        if cell is not None and not hasattr(cell.cell_contents, "tells_mirrorc"):
            cell.cell_contents = _told(name, cell.cell_contents)


def _cell_of(function: Any) -> CellType | None:
    """The cell that holds the function that a wrapper of torch's calls; None if torch writes its wrappers in another way."""
    if not isinstance(function, FunctionType) or "func" not in function.__code__.co_freevars:
        return None
    cells: Sequence[CellType] = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index("func")]


def _told(name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which tells the observer first."""

    def told(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _observer[0](name, listed)
        is_generator = isinstance(parameters, GeneratorType)  # torch warns of one that is empty, but of no empty list
        return clip((parameter for parameter in listed) if is_generator else listed, *args, **kwargs)

    told.tells_mirrorc = True  # type: ignore[attr-defined]
    return told
