"""The fewest examples that BatchNorm needs."""

from __future__ import annotations

from typing import Any

from torch import nn

_NORMALIZATIONS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def fewest_examples(*roots: Any) -> int:
    """The fewest examples of a shard: 2 if a BatchNorm uses batch statistics in forward, else 1."""
    modules = (module for root in roots if isinstance(root, nn.Module) for module in root.modules())
    return 2 if any(isinstance(m, _NORMALIZATIONS) and (m.training or m.running_mean is None) for m in modules) else 1
