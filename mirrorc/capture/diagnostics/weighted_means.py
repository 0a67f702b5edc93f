"""Losses whose mean divides by class weights or counted targets instead of examples."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mirrorc.capture.call.shards import Shards
from mirrorc.messages.source_lines import last_users_line
from mirrorc.torch_internals import leaf_of_placeholder

DEFAULT_IGNORE_INDEX = -100
_SIGNATURES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


@dataclass(frozen=True, eq=False)
class WeightedMean:
    """A call of a torch loss that averages over its targets.

    Attributes:
        is_weighted: whether it divides by the sum of class weights.
        leaf: the index of the tensor argument with the targets; None if unknown.
    """

    function: str
    target: Any
    is_weighted: bool
    ignore_index: int
    line: str = ""
    leaf: int | None = None


def bound_arguments(
    signatures: Mapping[Any, inspect.Signature], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A call's arguments with defaults; None if ``signatures`` lacks the function."""
    try:
        signature = signatures.get(function)
    except TypeError:  # not hashable
        return None
    if signature is None:
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def weighted_mean(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WeightedMean | None:
    arguments = bound_arguments(_SIGNATURES, function, args, kwargs)
    if arguments is None or arguments["reduction"] != "mean":
        return None
    return WeightedMean(
        function.__name__, arguments["target"], arguments["weight"] is not None, arguments["ignore_index"]
    )


def weighted_means_of(traced: fx.GraphModule) -> tuple[WeightedMean, ...]:
    means = []
    for node in traced.graph.nodes:
        mean = weighted_mean(node.target, node.args, node.kwargs) if node.op == "call_function" else None
        if mean is None or not isinstance(mean.target, fx.Node):
            continue
        value = mean.target.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            line = last_users_line(node.meta.get("stack_trace") or "")
            means.append(replace(mean, line=line, leaf=_leaf_behind(mean.target)))
    return tuple(means)


def _leaf_behind(node: fx.Node) -> int | None:
    while node.op != "placeholder":
        if len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    return leaf_of_placeholder(node)


def remarks_on(means: Sequence[WeightedMean], num_replicas: int) -> tuple[str, ...]:
    texts = [_text(mean) for mean in means if num_replicas > 1]
    return tuple(dict.fromkeys(text for text in texts if text))


def differences_in(means: Sequence[WeightedMean], shards: Shards) -> tuple[str, ...]:
    differences: list[str] = []
    present = [tensors for tensors, size in zip(shards.tensors, shards.num_examples, strict=True) if size]
    for mean in means if len(present) > 1 else ():
        targets_of_shards = [] if mean.leaf is None else [tensors[mean.leaf] for tensors in present]
        counts = [(int((targets == mean.ignore_index).sum()), targets.numel()) for targets in targets_of_shards]
        if len({few / many for few, many in counts if many}) > 1:
            numbers = ", ".join(f"{few} of {many}" for few, many in counts)
            differences.append(f"{_text(mean, ignores=True)} ({numbers} in the shards of this batch)")
        elif mean.is_weighted:
            differences.append(_text(mean))
    return tuple(dict.fromkeys(differences))


def _text(mean: WeightedMean, *, ignores: bool = False) -> str:
    """The divisor of a replica's mean, in words; empty for its number of examples."""
    divisors = [
        *(["the class weights"] if mean.is_weighted else []),
        *([f"the number of targets that are not {mean.ignore_index}"] if ignores or _ignores(mean) else []),
    ]
    place = f"{mean.function}{f' at {mean.line}' if mean.line else ''}"
    return f"in {place}, each device divides by {' and '.join(divisors)} of its own shard" if divisors else ""


def _ignores(mean: WeightedMean) -> bool:
    return mean.ignore_index != DEFAULT_IGNORE_INDEX
