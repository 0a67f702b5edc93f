"""A substitute for `torch.nn.SyncBatchNorm`, with statistics over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mirrorc.custom_ops.replica_collectives import all_reduce_value
from mirrorc.torch_internals import assert_true

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_ONE_VALUE = "a SyncBatchNorm in train mode needs more than one value per channel, and the whole batch has one"


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    if not self.training and self.running_mean is not None:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    values = input if input.dtype == torch.float64 else input.float()
    dims = [0, *range(2, input.dim())]
    shape = [1, -1] + [1] * (input.dim() - 2)
    local_count = values.new_full((1,), float(input.numel() // input.size(1)))
    sums, count = all_reduce_value(torch.cat([values.sum(dims), local_count])).split([input.size(1), 1])
    assert_true(count > 1, _ONE_VALUE)
    mean = sums / count
    centered = values - mean.view(shape)
    squares = all_reduce_value((centered * centered).sum(dims))
    if self.training and self.track_running_stats and self.running_mean is not None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            new = 1.0 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
            self.running_mean.copy_(self.running_mean * (1.0 - new) + mean.detach() * new)
            self.running_var.copy_(self.running_var * (1.0 - new) + squares.detach() / (count - 1.0) * new)
    normal = centered * torch.rsqrt(squares / count + self.eps).view(shape)
    if self.weight is not None:
        normal = normal * self.weight.view(shape)
    if self.bias is not None:
        normal = normal + self.bias.view(shape)
    return normal.to(input.dtype)


SYNCHRONIZED: Mapping[Callable[..., Any], Callable[..., Any]] = {nn.SyncBatchNorm.forward: _forward}
"""The substitute in a trace for the forward of `torch.nn.SyncBatchNorm`."""


def buffers_of_synchronized_norms(roots: Iterable[nn.Module]) -> set[int]:
    norms = {module for root in roots for module in root.modules() if isinstance(module, nn.SyncBatchNorm)}
    return {id(norm._buffers[name]) for norm in norms for name in _BUFFERS if norm._buffers.get(name) is not None}


def has_substitute(norm: nn.Module) -> bool:
    """False if the instance replaces its class's forward."""
    return type(norm).forward in SYNCHRONIZED and "forward" not in vars(norm)


def synchronizes(root: nn.Module) -> bool:
    norms = (module for module in root.modules() if isinstance(module, nn.SyncBatchNorm))
    return any(norm.training or norm.running_mean is None for norm in norms)
