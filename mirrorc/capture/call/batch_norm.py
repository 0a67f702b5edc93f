"""Modules that normalize examples by the statistics of their shard, and so need more than one."""

from __future__ import annotations

from typing import Any

from torch import nn

_NORMALIZATIONS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def fewest_examples(*roots: Any) -> int:
    """How many examples a shard should have: two, if a BatchNorm normalizes by the statistics of its shard, otherwise one.

    One example has no statistics: torch refuses it, unless it has several pixels.

    Args:
        roots: the model and the loss; what is no module counts for nothing.
    """
    modules = (module for root in roots if isinstance(root, nn.Module) for module in root.modules())
    return 2 if any(isinstance(m, _NORMALIZATIONS) and (m.training or m.running_mean is None) for m in modules) else 1
