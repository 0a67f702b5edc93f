"""Tells who clips gradients, however the clipping functions were imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType, FunctionType, GeneratorType
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

Observer = Callable[[str, Sequence[torch.Tensor]], None]

_observer: list[Observer] = []


def observe_clipping(observer: Observer) -> None:
    """Has a function told of every call of `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`, before it is carried out.

    Those names may have been imported anywhere before, so the functions stay the same objects: each calls what it finds in a
    cell of its closure, and that is replaced.

    Args:
        observer: takes the name of the function and the parameters that it was given; takes the place of an earlier observer.
    """
    _observer[:] = [observer]
    for function in (clip_grad_norm_, clip_grad_value_):
        cell = _cell_of(function)
        if cell is not None and not hasattr(cell.cell_contents, "tells_mirrorc"):
            cell.cell_contents = _told(cell.cell_contents)


def _cell_of(function: Any) -> CellType | None:
    """The cell that holds the function that a wrapper of torch's calls; None if torch writes its wrappers in another way."""
    if not isinstance(function, FunctionType) or "func" not in function.__code__.co_freevars:
        return None
    cells: Sequence[CellType] = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index("func")]


def _told(clip: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which tells the observer first."""

    def told(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if isinstance(parameters, GeneratorType):
                listed = list(parameters)
                parameters = (
                    parameter for parameter in listed
                )  # torch warns of an empty generator, but of no empty list
            else:
                listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _observer[0](clip.__name__, listed)
        return clip(parameters, *args, **kwargs)

    told.tells_mirrorc = True  # type: ignore[attr-defined]
    return told
