"""Flattens a call's arguments to tensors and plain values, and rebuilds them for the tracer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mirrorc.capture.call.argument_markers import BatchDim, Examples, PerReplica, Replicated
from mirrorc.capture.call.containers import flatten_container, paths_of_children, unflatten_container
from mirrorc.messages.problem import problem

Structure = tuple[Any, ...]  # nested and hashable; see _flatten


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor argument: ``tensor``, or ``per_replica`` if the user has split it.

    Attributes:
        split: dim 0 counts examples.
        column: for a list of `examples`, one tensor of each item. A replica gets the tensor of its item ``place``.
        counts_items: the tensor only encodes the number of items of a list of examples.
        is_guess: the list is not marked, and may be something else.
        is_moved: dim 0 was another dim of the argument, see `batch_dim`.
    """

    path: str
    tensor: torch.Tensor | None
    split: bool
    per_replica: tuple[torch.Tensor, ...] = ()
    column: tuple[torch.Tensor, ...] = ()
    place: int = 0
    counts_items: bool = False
    is_guess: bool = False
    is_moved: bool = False

    def of_items(self, begin: int, number: int) -> torch.Tensor:
        """The tensor for a replica with ``number`` items; without rows if the replica has no item at ``place``."""
        if self.place < number:
            return self.column[begin + self.place]
        return _no_rows(self.column[0])


class Constant:
    """A non-tensor argument. Programs are specialized on its value, or on its identity if it has no hash."""

    def __init__(self, value: Any, path: str = "") -> None:
        self.value = value
        self.path = path
        # compared by their text: -0.0 == 0.0, and nan != nan
        self._is_float = isinstance(value, float | complex | np.inexact)
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
    """The arguments of one step.

    Attributes:
        plain: strings, numbers, None, and lists or tuples of these, by name. A graph depends on those that it reads.
        differentiated: the indices of the leaves that get a gradient.
        unpacked: if a batch is the only argument, the call with the batch's parts; else empty.
    """

    leaves: tuple[Leaf, ...]
    structure: Structure
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)
    differentiated: frozenset[int] = frozenset()
    unpacked: str = ""


def flatten_call(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """``names`` are the names of positional parameters."""
    args, kwargs = with_lists_of_examples(args, kwargs)
    leaves: list[Leaf] = []
    plain: dict[str, Any] = {}
    positional = []
    for i, value in enumerate(args):
        path = names[i] if i < len(names) else f"args[{i}]"
        positional.append(_flatten_argument(value, path, leaves, plain))
    keyword = [(key, _flatten_argument(value, key, leaves, plain)) for key, value in kwargs.items()]
    return Call(tuple(leaves), (tuple(positional), tuple(keyword)), plain)


def _flatten_argument(value: Any, path: str, leaves: list[Leaf], plain: dict[str, Any]) -> Structure:
    try:
        return _flatten(value, path, leaves, "split", plain)
    except RecursionError:
        raise problem(
            ValueError,
            f"MC1309: argument {path!r} holds itself, directly or through what it holds",
            "it cannot be taken apart",
            "pass its parts, without the one that refers back",
        ) from None


_NUMPYS = (np.bool_, np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8)
_NANS = {kind: kind(math.nan) for kind in (float, np.float16, np.float32, np.float64)}
_PLAIN = frozenset({str, bytes, bool, int, float, type(None), *_NUMPYS})


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return all(type(item) in _PLAIN or _is_plain(item) for item in value)
    return kind in _PLAIN


def _flatten(value: Any, path: str, leaves: list[Leaf], mode: str, plain: dict[str, Any] | None) -> Structure:
    if isinstance(value, Replicated):
        return _flatten(value.value, path, leaves, "replicated", plain)
    if isinstance(value, PerReplica):
        return _flatten_per_replica(value, path, leaves)
    if isinstance(value, Examples):
        if mode != "split":
            raise _combined_marks(path)
        count = Leaf(path, torch.arange(len(value.items)), split=True, counts_items=True, is_guess=value.is_guess)
        return _flatten_examples(value, path, leaves, count)
    if isinstance(value, BatchDim):
        if mode == "replicated":
            return _flatten(value.value, path, leaves, mode, plain)
        structure = _flatten(value.value.movedim(value.dim, 0), path, leaves, mode, plain)
        leaves[-1] = dataclasses.replace(leaves[-1], is_moved=True)
        return ("batch dim", (value.dim,), (structure,))
    if isinstance(value, torch.Tensor):
        _refuse_tensor_kinds(value, path)
        leaves.append(Leaf(path, value, split=mode != "replicated"))
        return ("leaf", len(leaves) - 1)
    if isinstance(value, np.ndarray):
        raise problem(
            TypeError,
            f"MC1302: argument {path!r} is a numpy array, and only tensors are split",
            fix=f"torch.from_numpy({path})",
        )
    if plain is not None and _is_plain(value):
        return _plain_leaf(value, path, plain)
    parts = flatten_container(value, path)
    if parts is None:
        return ("constant", Constant(value, path))
    children = []
    for i, (child_path, child) in enumerate(parts.children):
        flat = _flatten(child, child_path, leaves, mode, plain)
        if flat[0] == "constant" and plain is not None and i >= len(parts.children) - parts.num_attributes:
            flat = _plain_leaf(child, child_path, plain)  # many attributes are never read
        children.append(flat)
    return (parts.kind, parts.detail, tuple(children))


def _plain_leaf(value: Any, path: str, plain: dict[str, Any]) -> Structure:
    while path in plain:
        path += "_"
    plain[path] = _with_shared_nan(value)
    return ("plain", path)


def _with_shared_nan(value: Any) -> Any:
    """Replaces positive nans by one object. Guards compare tuples, and tuples compare items by identity first."""
    if type(value) in _NANS and value != value and math.copysign(1.0, value) > 0:
        return _NANS[type(value)]
    if type(value) is not tuple:
        return value
    items = tuple(map(_with_shared_nan, value))
    return items if any(new is not old for new, old in zip(items, value, strict=True)) else value


def _refuse_tensor_kinds(tensor: torch.Tensor, path: str) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested:
        raise problem(
            TypeError,
            f"MC1302: argument {path!r} is a {type(tensor).__qualname__}, a kind of tensor of its own",
            "forward gets plain tensors",
            f"{path}.as_subclass(torch.Tensor)",
        )
    of_marks = ("_dynamo", "_has_dynamo", "_specialize_on")  # of `torch._dynamo.mark_dynamic`
    names = [name for name in getattr(tensor, "__dict__", ()) if not name.startswith(of_marks)]
    if names and not tensor.is_nested:  # `split_call` refuses nested tensors, whose attributes are torch's
        raise problem(
            TypeError,
            f"MC1302: argument {path!r} is a tensor with attributes that Python code has set, {', '.join(names)}",
            "its shards would not have them",
            f"pass what they hold as arguments, and the tensor as {path}.view_as({path})",
        )


def _flatten_per_replica(value: PerReplica, path: str, leaves: list[Leaf]) -> Structure:
    if value.values and all(isinstance(each, Examples) for each in value.values):
        counts = tuple(torch.arange(len(each.items)) for each in value.values)
        items = Examples([item for each in value.values for item in each.items])
        return _flatten_examples(items, path, leaves, Leaf(path, None, True, counts, counts_items=True))
    structures, per_replica = [], []
    for i, replica_value in enumerate(value.values):
        replica_leaves: list[Leaf] = []
        structures.append(_flatten(replica_value, f"{path}[replica {i}]", replica_leaves, "per replica", None))
        per_replica.append(replica_leaves)
    if not value.values or any(structure != structures[0] for structure in structures):
        are_lists = all(isinstance(each, list) for each in value.values) and bool(value.values)
        in_lists = ("mirrorc.PerReplica([mirrorc.examples(a), mirrorc.examples(b)]), if the items are examples",)
        raise problem(
            ValueError,
            f"MC1307: argument {path!r}: a PerReplica needs one value for each replica",
            "all have the same structure",
            (*(in_lists if are_lists else ()), "mirrorc.PerReplica([x0, x1])"),
        )
    start = len(leaves)
    for column in zip(*per_replica, strict=True):
        tensors = tuple(leaf.tensor for leaf in column)
        leaves.append(dataclasses.replace(column[0], path=path, tensor=None, per_replica=tensors))
    return _shift(structures[0], start)


def _flatten_examples(value: Examples, path: str, leaves: list[Leaf], count: Leaf) -> Structure:
    leaves.append(count)
    items = value.items
    children: list[Structure] = [("leaf", len(leaves) - 1)]
    each: list[list[Leaf]] = [[] for _ in items]
    structures = [
        _flatten(item, f"{path}[{i}]", of_item, "replicated", None)
        for i, (item, of_item) in enumerate(zip(items, each, strict=True))
    ]
    if any(leaf.tensor is None for of_item in each for leaf in of_item):
        raise _combined_marks(path)
    kinds = [
        (structure, [(leaf.tensor.dtype, leaf.tensor.dim()) for leaf in of_item if leaf.tensor is not None])
        for structure, of_item in zip(structures, each, strict=True)
    ]
    if other := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None):
        raise problem(
            ValueError,
            f"MC1310: items 0 and {other} of {path!r} differ in structure, plain values or kinds of tensors",
            "replicas with different items run one program",
            (
                "give each item the same keys, with tensors of the same dtype and number of dims",
                "torch.tensor(value) in place of a number that differs",
                "leave out what forward and loss do not read, such as file names",
            ),
        )
    columns = [tuple(leaf.tensor for leaf in column) for column in zip(*each, strict=True)]
    for i, (structure, of_item) in enumerate(zip(structures, each, strict=True)):
        children.append(_shift(structure, len(leaves)))
        both = zip(of_item, columns, strict=True)
        leaves += [dataclasses.replace(leaf, column=column, place=i) for leaf, column in both]
    return ("examples", (value.is_marked, ()), tuple(children))


def _shift(structure: Structure, start: int) -> Structure:
    if structure[0] == "leaf":
        return ("leaf", structure[1] + start)
    if structure[0] == "constant":
        return structure
    return (structure[0], structure[1], tuple(_shift(child, start) for child in structure[2]))


def _combined_marks(path: str) -> ValueError:
    return problem(
        ValueError,
        f"MC1310: argument {path!r} combines mirrorc.examples() with a mark around it or inside of it",
        "its items are split once",
        ("mirrorc.PerReplica([mirrorc.examples(a), mirrorc.examples(b)])", "leave one of the marks out"),
    )


Rebuild = Callable[[Structure, Sequence[Any], Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]


def rebuilding(structure: Structure) -> Rebuild:
    """Generates a function that rebuilds a call's arguments. Tracing a generic walk would take as long as a small model."""
    positional, keyword = structure
    args = ", ".join(_code_of(child, f"structure[0][{i}]") for i, child in enumerate(positional))
    kwargs = ", ".join(f"{key!r}: {_code_of(child, f'structure[1][{i}][1]')}" for i, (key, child) in enumerate(keyword))
    made: dict[str, Any] = {}
    lines = f"def rebuilt(structure, leaves, plain):\n    return [{args}], {{{kwargs}}}"
    exec(compile(lines, __file__, "exec"), globals(), made)  # code of names and numbers alone
    rebuilt: Rebuild = made["rebuilt"]
    return rebuilt


def _code_of(child: Structure, place: str) -> str:
    if child[0] == "leaf":
        return f"leaves[{child[1]}]"
    return f"plain[{child[1]!r}]" if child[0] == "plain" else f"rebuild({place}, leaves, plain)"


def rebuild(structure: Structure, leaves: Sequence[Any], plain: Mapping[str, Any]) -> Any:
    """Rebuilds one argument. Plain values are passed on unread, so that the tracer sees only reads by the user's code."""
    kind = structure[0]
    if kind == "leaf":
        return leaves[structure[1]]
    if kind == "plain":
        return plain[structure[1]]
    if kind == "constant":
        return structure[1].value
    children = [rebuild(child, leaves, plain) for child in structure[2]]
    if kind == "examples":
        return _own_items(structure[1][0], *children)
    if kind == "batch dim":
        return _with_dim_moved(children[0], *structure[1])
    if kind == "packed sequence" and any(isinstance(child, PerReplica) for child in children):
        return _packed_of_replicas(structure[1], *children)
    return unflatten_container(kind, structure[1], children)


def _own_items(is_marked: bool, count: Any, *items: Any) -> Any:
    if isinstance(count, slice):  # of `shard_batch`
        return Examples(items[count]) if is_marked else [*items[count]]
    if isinstance(count, list):
        return PerReplica([Examples(items[part]) for part in count])
    number = count.size(0)
    return [*items[:number], *items[-1:] * (number - len(items))]  # longer in a trace with one more example


def _with_dim_moved(value: Any, dim: int) -> Any:
    if isinstance(value, BatchDim):  # of `shard_batch`
        return BatchDim(value.value.movedim(0, dim), dim)
    if isinstance(value, PerReplica):
        return PerReplica([_with_dim_moved(each, dim) for each in value.values])
    return value.movedim(0, dim)


def _packed_of_replicas(detail: tuple[Any, ...], values: Any, lengths: Any) -> Any:
    if not isinstance(values, PerReplica):
        return unflatten_container("packed sequence", detail, [values, torch.cat(lengths.values)])
    each_lengths = lengths.values if isinstance(lengths, PerReplica) else [lengths] * len(values.values)
    both = zip(values.values, each_lengths, strict=True)
    return PerReplica([unflatten_container("packed sequence", detail, [*parts]) for parts in both])


def paths_of_containers(structure: Structure, names: Sequence[str]) -> list[str]:
    positional, keyword = structure
    named = [(names[i] if i < len(names) else f"args[{i}]", child) for i, child in enumerate(positional)]
    return [path for name, child in (*named, *keyword) for path in _paths_within(child, name)]


def _paths_within(structure: Structure, path: str) -> list[str]:
    if structure[0] in ("leaf", "plain", "constant", "batch dim"):
        return []
    kind, detail, children = structure
    if kind == "examples":
        paths = [path, *(f"{path}[{i}]" for i in range(len(children) - 1))]
    else:
        paths = paths_of_children(kind, detail, len(children), path)
    return [*(p for name, child in zip(paths, children, strict=True) for p in _paths_within(child, name)), path]


def without_examples(call: Call) -> Call:
    leaves = (_emptied(leaf) if leaf.split or leaf.column else leaf for leaf in call.leaves)
    return dataclasses.replace(call, leaves=tuple(leaves))


def _emptied(leaf: Leaf) -> Leaf:
    if leaf.tensor is None:
        return dataclasses.replace(leaf, per_replica=tuple(map(_no_rows, leaf.per_replica)))
    return dataclasses.replace(leaf, tensor=_no_rows(leaf.tensor), column=tuple(map(_no_rows, leaf.column)))


def _no_rows(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    return torch.empty_strided((0, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


_DEPTH = 2  # of dicts and tuples around such a list


def with_lists_of_examples(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Marks lists as `Examples` if they are as long as the batch and their tensors cannot be split along dim 0.

    A list of dicts is marked even if its tensors can be split; if they cannot, it is no guess.
    """
    values = (*args, *kwargs.values())
    if not any(isinstance(value, list | dict | tuple) for value in values):
        return args, kwargs
    number = _num_examples(values[0] if len(values) == 1 and type(values[0]) is tuple else values)
    are_lists = number is None
    length = _length_of_lists(values) if number is None else number
    if length is None:
        return args, kwargs

    def marked(value: Any) -> Any:
        split = _marked(value, length, _DEPTH)
        is_left = are_lists and split is value and type(value) is list  # its tensors may have as many rows by chance
        return Examples(value, is_marked=False, is_guess=True) if is_left else split

    return tuple(map(marked, args)), {key: marked(value) for key, value in kwargs.items()}


def _num_examples(values: Iterable[Any]) -> int | None:
    for value in values:
        if isinstance(value, Examples):
            return len(value.items)
        if isinstance(value, BatchDim):
            return value.value.size(value.dim)
        if isinstance(value, torch.Tensor) and value.dim() and not value.is_nested:
            return value.size(0)
        if type(value) is dict and (number := _num_examples(value.values())) is not None:
            return number
    return None


def _length_of_lists(values: Sequence[Any]) -> int | None:
    lists = [value for value in values if type(value) is list]
    lengths, have_dicts = {len(value) for value in lists}, any(type(item) is dict for value in lists for item in value)
    return lengths.pop() if len(lists) > 1 and len(lengths) == 1 and have_dicts else None


def _marked(value: Any, number: int, depth: int) -> Any:
    if type(value) is list and len(value) == number:
        return _marked_list(value, number)
    if not depth or type(value) not in (dict, tuple):
        return value
    children = list(value.values()) if isinstance(value, dict) else value
    marked = [_marked(child, number, depth - 1) for child in children]
    if all(new is old for new, old in zip(marked, children, strict=True)):
        return value
    return dict(zip(value, marked, strict=True)) if isinstance(value, dict) else tuple(marked)


def _marked_list(value: list[Any], number: int) -> Any:
    try:
        each = [list(_leaves_of(item, "")) for item in value]
    except (TypeError, RecursionError):  # `flatten_call` names the argument
        return value
    leaves = [leaf for of_item in each for _, leaf in of_item]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    have_tensors = all(any(isinstance(leaf, torch.Tensor) for _, leaf in of_item) for of_item in each)
    if not have_tensors or any(isinstance(leaf, _MARKERS) for leaf in leaves):
        return value
    are_dicts = all(isinstance(item, dict) for item in value)
    have_rows = all(tensor.dim() and tensor.size(0) == number for tensor in tensors)
    kinds = [[(path, *_kind(leaf)) for path, leaf in of_item] for of_item in each]
    are_alike = all(kind == kinds[0] for kind in kinds)
    if (have_rows or not are_dicts) and not (are_alike and (are_dicts or not have_rows)):
        return value
    return Examples(value, is_marked=False, is_guess=have_rows or not are_dicts)


_MARKERS = (Replicated, PerReplica, Examples, BatchDim)


def _leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    parts = None if isinstance(value, (torch.Tensor, *_MARKERS)) else flatten_container(value, path)
    if parts is None:
        yield path, value
    else:
        for child_path, child in parts.children:
            yield from _leaves_of(child, child_path)


def _kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    return type(leaf), leaf if isinstance(leaf, str | int | float | None) else id(leaf)
