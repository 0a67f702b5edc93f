"""Operators that backends fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.ir.nodes import is_compute
from mirrorc.torch_internals import pools_maxima, tells_places_of_maxima

aten, prims = torch.ops.aten, torch.ops.prims

_CHEAP = frozenset({
    aten.abs.default, aten.add.Scalar, aten.add.Tensor, aten.clamp_max.default, aten.clamp_min.default,
    aten.div.Scalar, aten.div.Tensor, aten.exp.default, aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar,
    aten.lt.Scalar, aten.maximum.default, aten.minimum.default, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default,
    aten.reciprocal.default, aten.relu.default, aten.rsqrt.default, aten.sigmoid.default, aten.sqrt.default,
    aten.sub.Scalar, aten.sub.Tensor, aten.where.self, prims.convert_element_type.default,
})  # fmt: skip
"""Elementwise operators that take less time than writing and reading their result."""

_TAKING = frozenset({
    aten.amax.default, aten.amin.default, aten.cat.default, aten.gather.default, aten.mean.dim,
    aten.scatter_add.default, aten.sum.default, aten.sum.dim_IntList, aten.var_mean.correction,
})  # fmt: skip
"""Other operators that backends fuse with elementwise operators before them, or with short-lived operands."""


def is_cheap(node: fx.Node) -> bool:
    """True for a value that is faster to recompute than to store and read."""
    return node.target in _CHEAP or (is_compute(node) and tells_places_of_maxima(node.target))


def is_fused(user: fx.Node) -> bool:
    """True if backends fuse a user with its operands' operators, so that the operands need no memory."""
    if not is_compute(user):
        return False
    if viewed(user) is not None:
        return all(map(is_fused, user.users))
    target: Any = user.target
    return torch.Tag.pointwise in target.tags or target in _TAKING or is_cheap(user) or pools_maxima(target)
