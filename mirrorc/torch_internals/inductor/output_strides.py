"""Strides of what a function compiled by Inductor returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Compiled = Callable[[list[Any]], Sequence[Any]]


def in_strides(function: Any, wanted: Sequence[tuple[Any, ...] | None]) -> Compiled:
    """Copies outputs whose strides are others than wanted.

    Inductor lays out values with gaps or expanded dims as it likes, and backward was compiled for their strides in the graph.
    """
    actual = function.output_strides or [None] * len(wanted)
    others = {
        place: strides
        for place, (strides, texts) in enumerate(zip(wanted, actual, strict=True))
        if strides is not None and texts is not None and _are_numbers(strides) and texts != tuple(map(str, strides))
    }
    if not others:
        return function

    def laid_out(arguments: list[Any]) -> Sequence[Any]:
        outputs = list(function(arguments))
        for place, strides in others.items():
            outputs[place] = _copied(outputs[place], strides)
        return outputs

    return laid_out


def _are_numbers(strides: Sequence[Any]) -> bool:
    return all(isinstance(stride, int) for stride in strides)


def _copied(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    shape = value.shape
    for dim, stride in enumerate(strides):
        if stride == 0 and shape[dim]:
            value = value.narrow(dim, 0, 1)
    memory = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return memory.copy_(value).expand(shape)
