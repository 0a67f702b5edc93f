"""Markers around arguments of a step that are not split along dim 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.call.replica_values import gathered, reduced
from mirrorc.messages.problem import problem


class PerReplica:
    """A value for each replica, in order of the devices: a batch that is already split, or an output of replicas' own.

    ``len``, iteration and `values` give them one by one.

    Args:
        values: their sizes along dim 0 may differ; each replica's loss is weighted by its size. A replica without
            examples runs neither forward nor backward. A list with an item for each example is `examples(list)`; a
            tensor whose dim 0 does not count examples, such as the indices of bags, is `replicated(tensor)`.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, Iterable) or isinstance(values, (torch.Tensor, str, Mapping)):
            kind = type(values).__name__
            raise problem(
                TypeError,
                f"MC1307: PerReplica takes values for all replicas, not {kind}",
                fix="mirrorc.PerReplica([x0, x1])",
            )
        self.values = tuple(values)

    def reduce(self, op: str = "sum", dim: int | None = None) -> Any:
        """The sum or mean over replicas, on the first value's device.

        Args:
            op: ``"sum"`` or ``"mean"``. As torch's, sums of integers and booleans are int64, and means of integers are floating.
            dim: also sum up this dim of each value, whose sizes may differ; the mean is then over all its elements.

        Raises:
            TypeError: a value is no tensor, nor a dict, list or tuple of tensors; or the mean of booleans is asked for.
            ValueError: shapes or structures differ, or ``op`` is another word.
        """
        return reduced(self.values, op, dim)

    def gather(self, dim: int = 0) -> Any:
        """All values in one tensor, joined along a dim, in which their sizes may differ; scalars become a vector.

        Raises:
            TypeError: a value is no tensor, nor a dict, list or tuple of tensors.
            ValueError: sizes of other dims, or structures, differ.
        """
        return gathered(self.values, dim)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        return f"PerReplica({len(self.values)} values)"


class Replicated:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "mirrorc.replicated(...)"


def replicated(value: Any) -> Any:
    """Marks an argument of a step: each replica gets the whole argument instead of a shard.

    Args:
        value: a tensor, or nested containers of tensors.
    """
    return Replicated(value)


class Examples:
    """A list of examples. ``is_guess`` is whether a list that the user has not marked may be something else."""

    def __init__(self, items: Sequence[Any], *, is_marked: bool = True, is_guess: bool = False) -> None:
        if not isinstance(items, list | tuple):
            kind = type(items).__name__
            raise problem(
                TypeError,
                f"MC1310: mirrorc.examples takes a list with an item for each example, not {kind}",
                fix=("mirrorc.examples(list(items))", "pass a tensor as it is: its dim 0 counts examples"),
            )
        self.items = list(items)
        self.is_marked, self.is_guess = is_marked, is_guess

    def __repr__(self) -> str:
        return f"mirrorc.examples({len(self.items)} items)"


def examples(items: Sequence[Any]) -> Any:
    """Marks a list with one item for each example: a step splits the list, not the tensors in it.

    Each replica gets a list of its own items, such as the targets of a detector, whose numbers of boxes differ.

    Args:
        items: tensors, or containers of tensors of one structure. Plain values in them are the same in all items.
    """
    return Examples(items)


class BatchDim:
    def __init__(self, value: torch.Tensor, dim: int) -> None:
        if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
            kind = f"a tensor of {value.dim()} dims" if isinstance(value, torch.Tensor) else type(value).__name__
            raise problem(
                ValueError,
                f"MC1306: mirrorc.batch_dim takes a tensor and one of its dims, not {kind} and {dim}",
                fix="mirrorc.batch_dim(hidden, 1)",
            )
        self.value, self.dim = value, dim % value.dim()

    def __repr__(self) -> str:
        return f"mirrorc.batch_dim(..., {self.dim})"


def batch_dim(tensor: torch.Tensor, dim: int) -> Any:
    """Marks a tensor whose examples lie along another dim than 0: a step splits it along this dim.

    Args:
        tensor: such as a sequence with time first, or a hidden state of shape ``[layers, batch, width]``.
        dim: the dimension that counts examples.
    """
    return BatchDim(tensor, dim)
