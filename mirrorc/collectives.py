"""Collectives for models and losses: over all workers' replicas in a training step, over one worker's in an evaluation."""

from __future__ import annotations

import torch

from mirrorc.custom_ops import replica_collectives
from mirrorc.messages.problem import problem

_OPS = ("sum", "mean")


def all_reduce(value: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Sums or averages a value over all replicas with examples, inside a model or a loss.

    It is differentiable: gradients with respect to the result are summed over all replicas' losses. In plain PyTorch it
    copies the value.

    Args:
        value: a tensor of the same shape on all replicas. The shape must not depend on the number of examples.
        op: "sum", or "mean": the sum divided by `num_replicas`.

    Returns:
        A new contiguous tensor of the value's shape and dtype, with the same bits on all replicas.

    Raises:
        TypeError: the value is not a tensor, is boolean, or has integers for a mean.
        ValueError: ``op`` is unknown.
    """
    if op not in _OPS:
        raise ValueError(f"MC1701: op is {op!r}: all_reduce gives a {' or a '.join(_OPS)}")
    _check_tensor(value, "all_reduce")
    if value.dtype == torch.bool:
        raise problem(
            TypeError, "MC1701: all_reduce adds numbers, and was given truth values", fix="value.to(torch.int64)"
        )
    if op == "mean" and not (value.is_floating_point() or value.is_complex()):
        raise problem(
            TypeError, f"MC1701: all_reduce was asked for a mean of {value.dtype}", fix=("value.float()", "op='sum'")
        )
    total = replica_collectives.all_reduce_value(value)
    return total / num_replicas() if op == "mean" else total


def all_gather(value: torch.Tensor) -> torch.Tensor:
    """Concatenates the values of all replicas with examples along dim 0, inside a model or a loss.

    Examples keep the order of the batch. It is differentiable: gradients with respect to a replica's rows are summed over
    all replicas' losses. In plain PyTorch it copies the value.

    Args:
        value: a tensor with at least one dimension. Only the number of rows may differ between replicas.

    Returns:
        A new contiguous tensor of the value's dtype, with the same bits on all replicas.

    Raises:
        TypeError: the value is not a tensor.
        ValueError: the value is a scalar.
    """
    _check_tensor(value, "all_gather")
    if value.dim() == 0:
        fix = "gather value[None]"
        raise problem(ValueError, "MC1701: all_gather puts rows one after the other, and a scalar has none", fix=fix)
    return replica_collectives.all_gather_value(value)


def replica_id() -> torch.Tensor:
    """The index of this replica among those with examples, an int64 scalar; 0 in plain PyTorch.

    Replicas share one graph, so Python cannot read it: use tensor operators such as ``torch.where``.
    """
    return replica_collectives.replica_number(torch.zeros((), dtype=torch.int64, device="cpu"))


def num_replicas() -> torch.Tensor:
    """The number of replicas with examples, an int64 scalar; 1 in plain PyTorch. See `replica_id`."""
    return replica_collectives.replica_count(torch.zeros((), dtype=torch.int64, device="cpu"))


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"MC1701: {name} takes a tensor, not {type(value).__name__}: make one of it with torch.tensor")
