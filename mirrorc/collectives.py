"""Collectives for models and losses: `all_reduce`, `all_gather`, `replica_id` and `num_replicas` of `mirrorc`.

In a training step they join the replicas of all workers, in an evaluation those of one worker.
"""

from __future__ import annotations

import torch

from mirrorc.custom_ops import replica_collectives

_OPS = ("sum", "mean")


def all_reduce(value: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Sums or averages a value over all replicas that have examples; for use in a model or a loss.

    Gradients flow through it: the gradient of a replica's value is the sum of the gradients of all replicas' losses with
    respect to the result. In plain PyTorch, the result is a copy of the value.

    Args:
        value: a tensor of numbers, of the same shape on all replicas: its shape must not depend on the number of examples.
        op: "sum", or "mean": the sum divided by `num_replicas`.

    Returns:
        A contiguous tensor of the value's shape and dtype, in memory of its own; the same bits on all replicas.

    Raises:
        TypeError: the value is no tensor, or is boolean; or the mean of integers is requested.
        ValueError: ``op`` is something else.
    """
    if op not in _OPS:
        raise ValueError(f"op is {op!r}: all_reduce gives a {' or a '.join(_OPS)}")
    _check_tensor(value, "all_reduce")
    if value.dtype == torch.bool:
        raise TypeError("all_reduce adds numbers, and was given truth values: convert them, as with .to(torch.int64)")
    if op == "mean" and not (value.is_floating_point() or value.is_complex()):
        raise TypeError(
            f"all_reduce was asked for a mean of {value.dtype}: convert the value with .float(), or take the sum"
        )
    total = replica_collectives.all_reduce_value(value)
    return total / num_replicas() if op == "mean" else total


def all_gather(value: torch.Tensor) -> torch.Tensor:
    """Concatenates the values of all replicas that have examples along dim 0; for use in a model or a loss.

    Rows are in the order of replicas, so rows of examples are in the order of the batch. Gradients flow through it: the
    gradient of a replica's value is the sum of the gradients of all replicas' losses with respect to its rows. In plain
    PyTorch, the result is a copy of the value.

    Args:
        value: a tensor with at least one dimension. Replicas may have different numbers of rows; other dimensions and the dtype
            are the same on all.

    Returns:
        A contiguous tensor of the value's dtype, in memory of its own; the same bits on all replicas.

    Raises:
        TypeError: the value is no tensor.
        ValueError: the value is a scalar, which has no rows.
    """
    _check_tensor(value, "all_gather")
    if value.dim() == 0:
        raise ValueError("all_gather puts rows one after the other, and a scalar has none: gather value[None]")
    return replica_collectives.all_gather_value(value)


def replica_id() -> torch.Tensor:
    """The number of the running replica among the replicas that have examples, a scalar of int64; 0 in plain PyTorch.

    It is a tensor, because replicas share one graph: compute with it, or compare it (``torch.where``); Python cannot read it.
    """
    return replica_collectives.replica_number(torch.zeros((), dtype=torch.int64, device="cpu"))


def num_replicas() -> torch.Tensor:
    """The number of replicas with examples, a scalar of int64; 1 in plain PyTorch. See `replica_id`."""
    return replica_collectives.replica_count(torch.zeros((), dtype=torch.int64, device="cpu"))


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} takes a tensor, not {type(value).__name__}: make one of it with torch.tensor")
