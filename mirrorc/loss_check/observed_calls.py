"""Observes calls that couple the examples of a batch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mirrorc.capture.diagnostics.weighted_means import WeightedMean, weighted_mean


class ObservedCalls:
    """The calls in one evaluation of a loss that couple examples.

    Attributes:
        weighted: the means over targets, with the numbers of ignored and of all targets.
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
    """A BatchNorm without running statistics gets constant ones."""
    x = arguments["input"]
    arguments["training"] = False
    if arguments["running_mean"] is None:
        arguments["running_mean"], arguments["running_var"] = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
