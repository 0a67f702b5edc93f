"""Knows which losses are means over something else than examples: over weights of classes, or over targets that are kept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

REMEDY = (
    "for a mean over examples use reduction='none' and average over each example's targets, then over the examples, or "
    "reduction='sum' and divide by a number that is the same for all shards"
)

_SIGNATURES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


@dataclass(frozen=True, eq=False)
class WeightedMean:
    """A call of a loss of torch that averages over its targets.

    Attributes:
        function: its name.
        target: its targets.
        is_weighted: whether classes have weights, by which it divides.
        ignore_index: targets of this value are left out of the mean.
    """

    function: str
    target: Any
    is_weighted: bool
    ignore_index: int


def weighted_mean(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WeightedMean | None:
    """How a call averages; None if it is none of these losses, or does not average."""
    try:
        signature = _SIGNATURES.get(function)
    except TypeError:  # not hashable
        return None
    if signature is None:
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["reduction"] != "mean":
        return None
    return WeightedMean(function.__name__, given["target"], given["weight"] is not None, given["ignore_index"])
