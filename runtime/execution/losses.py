"""The loss of a batch as the weighted sum of its replicas' losses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.runtime.devices.events import reserve_for_caller, wait_event
from mirrorc.runtime.state.accumulation_state import ProgramState
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples

_MOST_CACHED = 16


class Losses:
    def __init__(self, program: Program, state: ProgramState) -> None:
        self._program, self._state = program, state
        self._weights: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def weight_tensors(self, replica_weights: Sequence[float], examples: Examples) -> Sequence[torch.Tensor | None]:
        """Each replica's gradient of its loss, a scalar on its device: loss weight times loss scale. None without
        backward.
        """
        if not self._program.trains:
            return [None] * len(replica_weights)
        scale = self._state.weight_of_loss(self._program, examples)
        if not self._program.present:
            return [None] * len(replica_weights)
        weights = tuple(weight * scale for weight in replica_weights) if scale != 1.0 else tuple(replica_weights)
        if weights not in self._weights:
            if len(self._weights) >= _MOST_CACHED:  # this number may change in every step
                self._weights.clear()
            graphs = [module.graph for module in self._program.device_graphs.values()]
            graph = graphs[self._program.first_present]
            (argument,) = placeholders_of(graph, self._program.arguments, ArgumentKind.LOSS_WEIGHT)
            like = argument.meta["val"]
            self._weights[weights] = [
                torch.full(like.shape, weight, dtype=like.dtype, device=device.torch_device)
                for weight, device in zip(weights, self._program.devices, strict=True)
            ]
        return self._weights[weights]

    def wait(self, results: Sequence[tuple[torch.Tensor | None, Any]]) -> None:
        home = self._program.devices[0].torch_device
        for (loss, event), device in zip(results, self._program.devices, strict=True):
            if loss is not None:
                reserve_for_caller(loss)
            wait_event(event, home)
            wait_event(event, device.torch_device)  # the caller may reuse the shards' memory there

    def total(
        self, results: Sequence[tuple[torch.Tensor | None, Any]], weights: Sequence[float]
    ) -> torch.Tensor | None:
        """The weighted sum of the losses, on the first device. None without a loss, and on a worker without examples."""
        if not self._program.has_loss or not self._program.present:
            return None
        home = self._program.devices[0].torch_device
        pairs = zip(results, weights, strict=True)
        present = [(loss, weight) for (loss, _), weight in pairs if loss is not None]
        dtype = present[0][0].dtype
        exact = torch.float32 if dtype.itemsize < 4 else dtype
        with torch.no_grad():
            parts = [loss.to(home, exact) * weight for loss, weight in present]
            total = functools.reduce(torch.add, parts)
            if total.dtype is not dtype:
                total = total.to(dtype)
            return total.reshape(()) if total.dim() else total
