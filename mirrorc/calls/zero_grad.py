"""Accumulated gradients within the reach of the user's ``zero_grad``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from mirrorc.calls.call_lock import ExclusiveCalls
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients


class ZeroableGradients:
    """Drops accumulated gradients where a training loop would drop those of its parameters.

    Args:
        accumulated: the gradients.
        tensors: the model's parameters and buffers, by name of their variable.
        calls: those of the step; while one runs, it uses the gradients up or keeps them, whatever the optimizer's hooks do.
    """

    def __init__(
        self, accumulated: AccumulatedGradients, tensors: Mapping[str, torch.Tensor], calls: ExclusiveCalls
    ) -> None:
        self._accumulated, self._tensors, self._calls = accumulated, tensors, calls

    @property
    def has_any(self) -> bool:
        return self._accumulated.num_calls > 0

    def first_of(self, ids: Collection[int]) -> str | None:
        """The first of the parameters with these ids of which there is a gradient; None if there is none."""
        names = self._accumulated.names
        return next((name for name, tensor in self._tensors.items() if id(tensor) in ids and name in names), None)

    def drop(self, ids: Collection[int]) -> None:
        """Drops the gradients of the parameters that have these ids."""
        if not self._calls.is_any_running:
            self._accumulated.drop({name for name, tensor in self._tensors.items() if id(tensor) in ids})
