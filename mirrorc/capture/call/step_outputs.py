"""The outputs of a step other than its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.capture.call.argument_markers import PerReplica
from mirrorc.capture.call.call_arguments import Call, Constant, Structure, rebuild
from mirrorc.capture.call.containers import has_hash
from mirrorc.capture.call.shards import Shards
from mirrorc.capture.call.traced_outputs import IMMUTABLE, LeafKind, OutputLeaf, TracedOutputs
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem


@dataclass(frozen=True)
class Outputs:
    """The outputs of a program's steps other than their loss.

    Attributes:
        ways: how each output is gathered, see `mirrorc.ir.ops.gather`.
        unknown: the outputs, in one text, of which no trace could tell whether they have a row for each example.
    """

    ways: Mapping[str, str]
    unknown: str
    _structure: Structure
    _leaves: tuple[OutputLeaf, ...]
    _is_whole: bool  # whether there is one device
    _types: Mapping[str, tuple[torch.Size, torch.dtype]]

    def of_step(self, gathered: Mapping[str, Any], loss: torch.Tensor | None, call: Call, shards: Shards) -> Any:
        values = [self._value(leaf, gathered, loss, call, shards) for leaf in self._leaves]
        return rebuild(self._structure, values, {})

    def of_no_examples(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The outputs of a worker without examples: rows are empty, sums are 0, means are NaN."""
        outputs = {}
        for name, (shape, dtype) in self._types.items():
            if self.ways[name] == "concatenated":
                outputs[name] = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
            elif self.ways[name] == "summed":
                outputs[name] = torch.zeros((0, *shape), dtype=dtype, device=device).sum(0)
            else:
                outputs[name] = torch.full(shape, torch.nan, dtype=dtype, device=device)
        return outputs

    def _value(
        self, leaf: OutputLeaf, gathered: Mapping[str, Any], loss: torch.Tensor | None, call: Call, shards: Shards
    ) -> Any:
        if leaf.kind is LeafKind.LOSS:
            return loss
        if leaf.kind is LeafKind.ARGUMENT:
            argument = call.leaves[leaf.value]
            if argument.column:
                return _apart([tensors[leaf.value] for tensors in shards.tensors], self._is_whole)
            return argument.tensor if argument.tensor is not None else _apart(argument.per_replica, self._is_whole)
        if leaf.kind is LeafKind.CONSTANT:
            return leaf.value
        value = gathered[leaf.value]
        return _apart(value, self._is_whole) if isinstance(value, list) else value


def _apart(values: Sequence[Any], is_whole: bool) -> Any:
    return values[0] if is_whole else PerReplica(values)


def outputs_of(
    traced: Sequence[TracedOutputs],
    shard_of_replica: Sequence[int | None],
    sizes: Sequence[int],
    other: TracedOutputs | None,
) -> Outputs:
    """A tensor has a row for each example if its first dimension equals the number of examples in graphs with different
    numbers of examples. With one number only, equality may be a coincidence.

    Args:
        sizes: the number of examples in each graph, then in ``other``.
    """
    each = [*traced, *([other] if other is not None else [])]
    first = each[0]
    for outputs in each[1:]:
        _check_alike(first, outputs)
    is_whole = len(shard_of_replica) == 1
    ways = {name: _way(name, [outputs.types[name] for outputs in each], sizes, first.summed) for name in first.types}
    unknown = [name for name, (shape, _) in first.types.items() if shape and shape[0] == sizes[0]]
    note = ""
    if unknown and len(set(sizes)) == 1 and not is_whole:
        note = ", ".join(map(repr, unknown))
    leaves = [_common(places, shard_of_replica) for places in zip(*(outputs.leaves for outputs in each), strict=True)]
    return Outputs(ways, note, first.structure, tuple(leaves), is_whole, first.types)


def refuse_outputs_apart(
    ways: Mapping[str, str], traced: Sequence[TracedOutputs], *, has_examples: bool = True
) -> None:
    """Refuses outputs that differ between microbatches, or that workers without examples cannot produce."""
    apart = [name for name, how in ways.items() if how == "apart"]
    each = [[leaf for leaf in outputs.leaves if leaf.kind is LeafKind.CONSTANT] for outputs in traced]
    constants = zip(*each, strict=False)
    apart += [
        first.path
        for first, *others in constants
        if not all(is_same_constant(first.value, other.value) for other in others)
    ]
    if apart:
        what = f"{apart[0]!r} of what forward returns has no row for each example and is no mean over them"
        fixes = (
            "mirrorc.summed(value), for a count or a sum",
            "return a mean, or a tensor with a row for each example",
        )
        if not has_examples:
            raise problem(
                CaptureError,
                f"MC2401: {what}",
                "this worker has no examples, and so none to give",
                (*fixes, "leave return_outputs= out"),
            )
        raise problem(
            CaptureError,
            f"MC2401: {what}",
            "each microbatch gives one of its own, and they cannot be put together",
            (*fixes, "leave microbatches= or return_outputs= out"),
        )


def _check_alike(first: TracedOutputs, other: TracedOutputs) -> None:
    kinds = [[(leaf.path, leaf.kind) for leaf in outputs.leaves] for outputs in (first, other)]
    if first.structure != other.structure or kinds[0] != kinds[1] or list(first.types) != list(other.types):
        differing = next((a[0] for a, b in zip(*kinds, strict=False) if a != b), "outputs")
        raise problem(
            CaptureError,
            f"MC2401: {differing!r} of what forward returns has another structure for another number of examples",
            "replicas have shards, and their outputs could not be put together",
            (
                "return tensors with a row for each example, in place of lists with an item for each",
                "leave return_outputs= out",
            ),
        )


def _way(
    name: str, types: Sequence[tuple[torch.Size, torch.dtype]], sizes: Sequence[int], summed: frozenset[str]
) -> str:
    shapes, dtype = [shape for shape, _ in types], types[0][1]
    if name in summed:
        if len(set(shapes)) > 1:
            shapes_differ = f"({list(shapes[0])} and {list(next(s for s in shapes if s != shapes[0]))})"
            raise problem(
                CaptureError,
                f"MC2402: {name!r} is marked by mirrorc.summed(), but its shape follows the number of examples {shapes_differ}",
                "there is nothing to add up",
                "mirrorc.summed(value.sum(0)), the sum over the examples",
            )
        return "summed"
    if not any(shapes):
        return "averaged" if dtype.is_floating_point or dtype.is_complex else "apart"
    follows = len(set(sizes)) > 1 and all(shape[:1] == (size,) for shape, size in zip(shapes, sizes, strict=True))
    return "concatenated" if follows and len({shape[1:] for shape in shapes}) == 1 else "apart"


def _common(places: Sequence[OutputLeaf], shard_of_replica: Sequence[int | None]) -> OutputLeaf:
    first = places[0]
    if first.kind is not LeafKind.CONSTANT or all(is_same_constant(first.value, place.value) for place in places[1:]):
        return first
    values = [places[shard].value for shard in shard_of_replica if shard is not None]
    if not values:
        return first  # without examples, `refuse_outputs_apart` refuses it
    return OutputLeaf(first.path, LeafKind.CONSTANT, _apart(values, len(shard_of_replica) == 1))


def is_same_constant(value: Any, other: Any) -> bool:
    """Mutable objects must be identical. Other objects must be equal, including the signs of zeros."""
    if isinstance(value, IMMUTABLE) and isinstance(other, IMMUTABLE):
        if has_hash(value):
            return Constant(value) == Constant(other)
        return bool(type(value) is type(other) and value == other)  # a slice before Python 3.12
    return value is other
