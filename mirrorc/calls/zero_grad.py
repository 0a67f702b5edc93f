"""Makes the user's ``zero_grad`` drop accumulated gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from mirrorc.calls.call_lock import ExclusiveCalls
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients


class ZeroableGradients:
    """Drops accumulated gradients at the user's ``zero_grad`` of an optimizer or model, except during a call."""

    def __init__(
        self, accumulated: AccumulatedGradients, tensors: Mapping[str, torch.Tensor], calls: ExclusiveCalls
    ) -> None:
        self._accumulated, self._tensors, self._calls = accumulated, tensors, calls

    @property
    def has_any(self) -> bool:
        return self._accumulated.num_calls > 0

    def first_of(self, ids: Collection[int]) -> str | None:
        names = self._accumulated.names
        return next((name for name, tensor in self._tensors.items() if id(tensor) in ids and name in names), None)

    def drop(self, ids: Collection[int]) -> None:
        if not self._calls.is_any_running:
            self._accumulated.drop({name for name, tensor in self._tensors.items() if id(tensor) in ids})
