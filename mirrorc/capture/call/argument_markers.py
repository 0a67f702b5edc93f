"""Markers around arguments of a step that are not split along dim 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mirrorc.messages.problem import problem


class PerReplica:
    """One value per replica, in the order of the devices: a batch that is already split, or an output that is not
    gathered.

    ``len`` and iteration work as for a tuple.

    Args:
        values: their sizes along dim 0 may differ; each replica's loss is weighted by its size. A replica without
            examples runs neither forward nor backward. Mark a list with an item for each example by `examples`. Mark a
            tensor whose dim 0 does not count examples, such as the indices of bags, by `replicated`.
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
            op: ``"sum"`` or ``"mean"``. As torch's, sums of integers and booleans are int64, and means of integers are
                floating.
            dim: also reduce this dim of each value; its sizes may differ. The mean is then over all its elements.

        Raises:
            TypeError: a value is not a tensor, nor a dict, list or tuple of tensors; or the mean of booleans.
            ValueError: shapes or structures differ, or ``op`` is another word.
        """
        if op not in ("sum", "mean"):
            raise problem(
                ValueError, f"MC1307: op is {op!r}", "values are summed up or averaged", "op='sum' or op='mean'"
            )
        return _combined(self.values, lambda tensors: _reduced(tensors, op, dim))

    def gather(self, dim: int = 0) -> Any:
        """All values concatenated along a dim, whose sizes may differ. Scalars become a vector.

        Raises:
            TypeError: a value is not a tensor, nor a dict, list or tuple of tensors.
            ValueError: sizes of other dims, or structures, differ.
        """
        return _combined(self.values, lambda tensors: _gathered(tensors, dim))

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
    """A list of examples. ``is_guess``: the user has not marked the list, so it may be something else."""

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

    Each replica gets a list of its own items. An example is the targets of a detector: their numbers of boxes differ.

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
    """Marks a tensor whose examples lie along a dim other than 0: a step splits it along that dim.

    Args:
        tensor: such as a sequence with time first, or a hidden state of shape ``[layers, batch, width]``.
        dim: the dimension that counts examples.
    """
    return BatchDim(tensor, dim)


def _combined(values: Sequence[Any], combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    first = values[0] if values else None
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        return combine([value.to(first.device) for value in values])
    if any(type(value) is not type(first) for value in values) or not isinstance(first, Mapping | list | tuple):
        kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in values)) or "nothing"
        raise problem(
            TypeError,
            f"MC1307: the values are {kinds}",
            "tensors are reduced and gathered, alone or in dicts, lists and tuples",
            "value.values, for the values themselves",
        )
    places = [tuple(value) if isinstance(value, Mapping) else range(len(value)) for value in values]
    if any({*place} != {*places[0]} for place in places):
        raise problem(
            ValueError, "MC1307: the values have different entries", fix="value.values, for the values themselves"
        )
    combined = [_combined([value[place] for value in values], combine) for place in places[0]]
    if isinstance(first, Mapping):
        return dict(zip(places[0], combined, strict=True))
    return type(first)(*combined) if hasattr(first, "_fields") else type(first)(combined)


def _reduced(tensors: list[torch.Tensor], op: str, dim: int | None) -> torch.Tensor:
    if op == "mean" and any(tensor.dtype is torch.bool for tensor in tensors):
        raise problem(TypeError, "MC1307: booleans have no mean", fix="value.reduce('sum'), which counts them")
    num_terms = len(tensors) if dim is None else sum(tensor.size(dim) for tensor in tensors)
    given = tensors[0].dtype
    wide = torch.promote_types(given, torch.float32 if given.is_floating_point or given.is_complex else torch.int64)
    terms = [tensor.to(wide) if dim is None else tensor.sum(dim, dtype=wide) for tensor in tensors]
    if any(term.shape != terms[0].shape for term in terms):
        raise _other_shapes(tensors, "give the dim in which they differ: value.reduce('sum', dim=0)")
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    total = total / num_terms if op == "mean" else total
    total = total.to(given) if wide.is_floating_point or wide.is_complex else total
    return total.clone() if total is tensors[0] else total


def _gathered(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    other_sizes = {(t.dim(), *(n for i, n in enumerate(t.shape) if i != dim % t.dim())) for t in tensors if t.dim()}
    if len(other_sizes) > 1 or not all(t.dim() for t in tensors):
        raise _other_shapes(tensors, "pad them, or take value.values")
    return torch.cat(tensors, dim)


def _other_shapes(tensors: Sequence[torch.Tensor], fix: str) -> ValueError:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return problem(ValueError, "MC1307: the values have different shapes", shapes, fix)
