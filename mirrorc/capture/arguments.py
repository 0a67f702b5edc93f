"""Takes the arguments of a call apart into tensors, checks and splits these, and puts arguments together again for the tracer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Structure = tuple[Any, ...]  # nested and hashable; see _flatten


class PerReplica:
    """A value that is already split: one tensor (or nested tensors) for each replica, in order of the devices.

    Args:
        values: one value for each replica. Their sizes along dim 0 may differ; each replica's loss is weighted by its size.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerReplica({len(self.values)} values)"


class Replicated:
    """A value that is passed to every replica whole; made by `replicated`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "mirrorc.replicated(...)"


def replicated(value: Any) -> Any:
    """Marks an argument of a step that every replica gets whole, instead of a shard of it.

    Args:
        value: a tensor, or nested containers of tensors.
    """
    return Replicated(value)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor argument: either ``tensor``, which is to be split or replicated, or ``per_replica``, which is split already."""

    path: str
    tensor: torch.Tensor | None
    split: bool
    per_replica: tuple[torch.Tensor, ...] = ()


class Constant:
    """An argument that is no tensor; programs are specialized on its value, or on its identity if it cannot be hashed.

    Attributes:
        value: the argument.
        path: its name, which has no part in comparisons.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        self.value = value
        self.path = path
        self._is_float = isinstance(value, float | complex)  # told apart by their text: -0.0 == 0.0, and nan != nan
        try:
            self._key: Any = (type(value), repr(value) if self._is_float else hash(value))
        except TypeError:
            self._key = (type(value), id(value))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or self._key != other._key:
            return False
        return self._is_float or self.value is other.value or bool(self.value == other.value)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one step: their tensors, and the structure that holds them."""

    leaves: tuple[Leaf, ...]
    structure: Structure


def flatten_call(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Takes a call apart. ``names`` are the names of the positional parameters, for messages and dumps."""
    leaves: list[Leaf] = []
    positional = []
    for i, value in enumerate(args):
        path = names[i] if i < len(names) else f"args[{i}]"
        positional.append(_flatten(value, path, leaves, "split"))
    keyword = [(key, _flatten(value, key, leaves, "split")) for key, value in kwargs.items()]
    return Call(tuple(leaves), (tuple(positional), tuple(keyword)))


def _flatten(value: Any, path: str, leaves: list[Leaf], mode: str) -> Structure:
    if isinstance(value, Replicated):
        return _flatten(value.value, path, leaves, "replicated")
    if isinstance(value, PerReplica):
        return _flatten_per_replica(value, path, leaves)
    if isinstance(value, torch.Tensor):
        leaves.append(Leaf(path, value, split=mode == "split"))
        return ("leaf", len(leaves) - 1)
    if isinstance(value, np.ndarray):
        raise TypeError(f"argument {path!r} is a numpy array: pass torch.from_numpy({path}), so that it can be split")
    container = _children(value, path)
    if container is None:
        return ("constant", Constant(value, path))
    kind, detail, children = container
    return (kind, detail, tuple(_flatten(child, child_path, leaves, mode) for child_path, child in children))


def _flatten_per_replica(value: PerReplica, path: str, leaves: list[Leaf]) -> Structure:
    structures, per_replica = [], []
    for i, replica_value in enumerate(value.values):
        own: list[Leaf] = []
        structures.append(_flatten(replica_value, f"{path}[replica {i}]", own, "replicated"))
        per_replica.append(own)
    if not value.values or any(structure != structures[0] for structure in structures):
        raise ValueError(f"argument {path!r}: a PerReplica needs one value for each replica, all of the same structure")
    start = len(leaves)
    for column in zip(*per_replica, strict=True):
        leaves.append(Leaf(path, None, split=True, per_replica=tuple(leaf.tensor for leaf in column)))
    return _shift(structures[0], start)


def _shift(structure: Structure, start: int) -> Structure:
    if structure[0] == "leaf":
        return ("leaf", structure[1] + start)
    if structure[0] == "constant":
        return structure
    return (structure[0], structure[1], tuple(_shift(child, start) for child in structure[2]))


def _children(value: Any, path: str) -> tuple[str, Any, Iterator[tuple[str, Any]]] | None:
    if isinstance(value, Mapping):
        keys = tuple(value)
        return (
            "mapping",
            (type(value) if isinstance(value, dict) else dict, keys),
            ((f"{path}.{key}", value[key]) for key in keys),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", type(value), ((f"{path}.{name}", getattr(value, name)) for name in value._fields)
    if isinstance(value, list | tuple):
        return (
            "sequence",
            list if isinstance(value, list) else tuple,
            ((f"{path}[{i}]", child) for i, child in enumerate(value)),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value) if f.init)
        return "dataclass", (type(value), names), ((f"{path}.{name}", getattr(value, name)) for name in names)
    return None


def rebuild_call(structure: Structure, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Puts positional and keyword arguments together again; runs under the tracer."""
    positional, keyword = structure
    args = [rebuild(child, leaves) for child in positional]
    kwargs = {key: rebuild(child, leaves) for key, child in keyword}
    return args, kwargs


def rebuild(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Puts one argument together again."""
    kind = structure[0]
    if kind == "leaf":
        return leaves[structure[1]]
    if kind == "constant":
        return structure[1].value
    detail = structure[1]
    children = [rebuild(child, leaves) for child in structure[2]]
    if kind == "mapping":
        plain = dict(zip(detail[1], children, strict=True))
        return plain if detail[0] is dict else detail[0](plain)
    if kind == "dataclass":
        return detail[0](**dict(zip(detail[1], children, strict=True)))
    if kind == "namedtuple":
        return detail(*children)
    return children if detail is list else tuple(children)


@dataclasses.dataclass(frozen=True)
class Shards:
    """A batch that has been split.

    Attributes:
        tensors: for each replica, its tensor arguments in order of the call's leaves.
        num_examples: for each replica, how many examples of the batch it has.
    """

    tensors: tuple[tuple[torch.Tensor, ...], ...]
    num_examples: tuple[int, ...]


def split_call(call: Call, num_replicas: int) -> Shards:
    """Splits the tensors of a call along dim 0, into shards whose sizes differ by at most one.

    Raises:
        ValueError: no tensor to split, tensors that disagree on dim 0, or fewer examples than replicas.
    """
    sizes = _shard_sizes(call, num_replicas)
    columns: list[Sequence[torch.Tensor]] = []
    for leaf in call.leaves:
        if leaf.tensor is None:
            columns.append([tensor.detach() for tensor in leaf.per_replica])
        elif leaf.split:
            columns.append(leaf.tensor.detach().split_with_sizes(sizes))
        else:
            columns.append([leaf.tensor.detach()] * num_replicas)
    return Shards(tuple(zip(*columns, strict=True)), sizes)


def _shard_sizes(call: Call, num_replicas: int) -> tuple[int, ...]:
    wanted: tuple[int, ...] | None = None
    first = ""
    for leaf in call.leaves:
        if not leaf.split:
            continue
        found = _sizes_of(leaf, num_replicas)
        if wanted is None:
            wanted, first = found, leaf.path
        elif found != wanted:
            say = _per_replica if sum(wanted) == sum(found) else _in_all
            raise ValueError(
                f"arguments disagree on dim 0, the batch: {first!r} has {say(wanted)} examples, {leaf.path!r} has "
                f"{say(found)}; make them agree, or pass a tensor that is no batch as mirrorc.replicated({leaf.path})"
                + _if_listed(first, leaf.path)
            )
    if wanted is None:
        raise ValueError(
            "the call has no tensor to split: data parallelism splits tensor arguments along dim 0; pass the batch as "
            "tensors, not all of them replicated"
        )
    return wanted


def _if_listed(*paths: str) -> str:
    """What to do if an argument is a list of examples, such as images."""
    lists = [path.rpartition("[")[0] for path in paths if path.endswith("]")]
    if not lists:
        return ""
    return f". Each tensor in {lists[0]!r} is split: if it is one example, make one tensor of them, torch.stack({lists[0]})"


def _sizes_of(leaf: Leaf, num_replicas: int) -> tuple[int, ...]:
    if leaf.tensor is None:
        if len(leaf.per_replica) != num_replicas:
            raise ValueError(
                f"argument {leaf.path!r} is a PerReplica of {len(leaf.per_replica)} values, but there are "
                f"{num_replicas} replicas; give one value for each device"
            )
        if any(tensor.dim() == 0 for tensor in leaf.per_replica):
            raise ValueError(f"argument {leaf.path!r} is a PerReplica of scalars: it has no dim 0 to count examples by")
        sizes = tuple(tensor.size(0) for tensor in leaf.per_replica)
        if 0 in sizes:
            raise ValueError(f"argument {leaf.path!r}: replica {sizes.index(0)} has no example; give each at least one")
        return sizes
    if leaf.tensor.dim() == 0:
        raise ValueError(
            f"argument {leaf.path!r} is a scalar tensor and cannot be split along dim 0; pass it as "
            f"mirrorc.replicated({leaf.path})"
        )
    total = leaf.tensor.size(0)
    if total < num_replicas:
        raise ValueError(
            f"argument {leaf.path!r} has {total} examples for {num_replicas} replicas: every replica needs at least "
            f"one; give a larger batch, use fewer devices, or pass mirrorc.replicated({leaf.path}) if it is no batch"
        )
    return tuple(total // num_replicas + (i < total % num_replicas) for i in range(num_replicas))


def _in_all(sizes: tuple[int, ...]) -> str:
    return str(sum(sizes))


def _per_replica(sizes: tuple[int, ...]) -> str:
    return " + ".join(str(size) for size in sizes)
