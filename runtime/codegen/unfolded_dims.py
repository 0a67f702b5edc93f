"""Replaces views that fold and unfold symbolic dimensions by one permutation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mirrorc.ir.rearrangements import TRANSPOSITIONS, VIEWS_IN_ORDER
from mirrorc.torch_internals import is_operator, is_symbolic, schema_of, size_key, sizes_key

aten = torch.ops.aten

_SAME_VALUES = (aten.alias.default, aten.detach.default)
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims)


@dataclass(frozen=True, eq=False)
class _Part:
    """A factor of a dimension's size that no view splits; compared by identity."""

    size: Any


_Dims = tuple[tuple[_Part, ...], ...]


@dataclass(frozen=True)
class _Arrangement:
    """The arrangement of a source's elements in a value.

    Attributes:
        parts: the source's dimensions, except those of size 1. A dimension split by a view is listed as its parts.
        dims: for each dimension of the value, its parts; empty for size 1.
        is_copied: after a copy, memory is in the order of the dimensions.
        unfolds: a symbolic dimension of several parts was split again.
    """

    source: fx.Node
    parts: tuple[_Part, ...]
    dims: _Dims
    is_copied: bool = False
    unfolds: bool = False


def unfold_dims(graph: fx.Graph) -> int:
    """Returns the number of rewritten values::

        x: f32[s0, 4, s1, 32]
        folded = aten.view(x, [4*s0, s1, 32])
        turned = aten.transpose(folded, 0, 1)         ->    turned = aten.permute(x, [2, 0, 1, 3])
        copy   = aten.clone(turned)                         copy   = aten.clone(turned)
        y      = aten.view(copy, [s1, s0, 128])             y      = aten.view(copy, [s1, s0, 128])

    Attention folds batch and heads like this. Inductor makes one loop of the folded dimension, with index arithmetic
    for every element. Symbolic sizes leave divisions by ``4*s0`` and ``s0`` in it, so the loop is not vectorised.

    Needs: a functional graph with types and placeholders for symbolic sizes.

    Guarantees: values, strides and aliasing are unchanged.
    """
    arrangements = dict(_arrangements(graph))
    nodes_of_sizes = {
        size_key(node.meta["val"]): node
        for node in graph.find_nodes(op="placeholder")
        if is_symbolic(node.meta.get("val"))
    }
    ends = [
        node
        for node, arrangement in arrangements.items()
        if arrangement.unfolds and not _is_passed_on(node, arrangements)
    ]
    num_changed = sum(_rewrite(node, arrangements[node], nodes_of_sizes) for node in ends)
    if num_changed:
        for node in reversed(arrangements):
            if not node.users and arrangements[node].source is not node:
                graph.erase_node(node)
    return num_changed


def _is_passed_on(node: fx.Node, arrangements: Mapping[fx.Node, _Arrangement]) -> bool:
    return all(user in arrangements and arrangements[user].source is arrangements[node].source for user in node.users)


def _arrangements(graph: fx.Graph) -> Iterator[tuple[fx.Node, _Arrangement]]:
    written = {value for node in graph.nodes for value in _written(node)}
    arrangements: dict[fx.Node, _Arrangement] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        operand = node.args[0] if node.args else None
        before = arrangements.get(operand) if isinstance(operand, fx.Node) and operand not in written else None
        arrangement = None
        if before is not None and not (before.is_copied and len(operand.users) > 1):  # type: ignore[union-attr]
            arrangement = _rearranged(node, before, sizes_key(value.shape))
        if arrangement is None:
            parts = [_Part(size) for size in sizes_key(value.shape)]
            dims = tuple(() if part.size == 1 else (part,) for part in parts)
            arrangement = _Arrangement(node, tuple(part for dim in dims for part in dim), dims)
        arrangements[node] = arrangement
        yield node, arrangement


def _written(node: fx.Node) -> Iterator[Any]:
    if node.op != "call_function" or not is_operator(node.target):
        return
    for argument, value in zip(schema_of(node.target).arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield value


def _rearranged(node: fx.Node, before: _Arrangement, sizes: Sequence[Any]) -> _Arrangement | None:
    target, rank = node.target, len(before.dims)
    if target in _SAME_VALUES:
        return before
    if target is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format:
        return replace(before, is_copied=True)
    if target in VIEWS_IN_ORDER:
        return _reshaped(before, sizes)
    if target in TRANSPOSITIONS:
        dims = _permutation(node, rank)
        return replace(before, dims=tuple(before.dims[dim] for dim in dims))
    if target is aten.unsqueeze.default:
        place = int(node.args[1]) % (rank + 1)  # type: ignore[arg-type]
        return replace(before, dims=(*before.dims[:place], (), *before.dims[place:]))
    if target in _SQUEEZES:
        argument: Any = node.args[1]
        named = {dim % rank for dim in ([argument] if isinstance(argument, int) else argument)}
        return replace(before, dims=tuple(parts for dim, parts in enumerate(before.dims) if parts or dim not in named))
    return None


def _permutation(node: fx.Node, rank: int) -> list[int]:
    dims = list(range(rank))
    arguments: Any = node.args[1:]
    if node.target is aten.permute.default:
        return [dim % rank for dim in arguments[0]]
    if rank > 1:
        first, second = arguments if node.target is aten.transpose.int else (0, 1)
        dims[first], dims[second] = dims[second], dims[first]
    return dims


def _reshaped(before: _Arrangement, sizes: Sequence[Any]) -> _Arrangement | None:
    waiting = deque(part for dim in before.dims for part in dim)
    cuts: dict[_Part, tuple[_Part, _Part]] = {}
    dims: list[tuple[_Part, ...]] = []
    for size in sizes:
        left, factors = size, []
        while left != 1:
            if not waiting:
                return None
            part = waiting.popleft()
            more, rest = _quotient(left, part.size), _quotient(part.size, left)
            if more is not None:
                factors.append(part)
                left = more
            elif rest is not None:
                cuts[part] = _Part(left), _Part(rest)
                factors.append(cuts[part][0])
                waiting.appendleft(cuts[part][1])
                left = 1
            else:
                return None
        dims.append(tuple(factors))
    if waiting:
        return None
    folded = [dim for dim in before.dims if len(dim) > 1 and not all(isinstance(part.size, int) for part in dim)]
    unfolds = before.unfolds or any(_cut(dim, cuts) not in dims for dim in folded)
    return replace(before, parts=_cut(before.parts, cuts), dims=tuple(dims), unfolds=unfolds)


def _cut(parts: Sequence[_Part], cuts: Mapping[_Part, tuple[_Part, _Part]]) -> tuple[_Part, ...]:
    return tuple(piece for part in parts for piece in (_cut(cuts[part], cuts) if part in cuts else (part,)))


def _quotient(size: Any, divisor: Any) -> Any:
    if size == 0 or divisor == 0:
        return None
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if size % divisor == 0 else None
    quotient = size / divisor
    if not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def _rewrite(node: fx.Node, arrangement: _Arrangement, nodes_of_sizes: Mapping[Any, fx.Node]) -> bool:
    last = [part for dim in arrangement.dims for part in dim]
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    sizes: Sequence[Any] = sizes_key(arrangement.source.meta["val"].shape)
    if [part.size for part in arrangement.parts] != list(sizes):
        steps.append((aten.view.default, ([part.size for part in arrangement.parts],), {}))
    order = [arrangement.parts.index(part) for part in last]
    if order != sorted(order):
        steps.append((aten.permute.default, (order,), {}))
    if arrangement.is_copied:
        steps.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
    sizes = sizes_key(node.meta["val"].shape)
    if [part.size for part in last] != list(sizes):
        steps.append((aten.view.default, (list(sizes),), {}))
    keys = [size for target, args, _ in steps if target is aten.view.default for size in args[0]]
    if not steps or any(not isinstance(key, int) and key not in nodes_of_sizes for key in keys):
        return False
    made = arrangement.source
    with node.graph.inserting_before(node):
        for target, args, kwargs in steps:
            new_args = tuple([nodes_of_sizes.get(item, item) for item in items] for items in args)
            after = node.graph.call_function(target, (made, *new_args), kwargs)
            after.meta = {**node.meta, "val": _value(target, (made, *new_args), kwargs)}
            made = after
    if sizes_key(made.meta["val"].stride()) != sizes_key(node.meta["val"].stride()):
        _erase_chain(made, arrangement.source)
        return False
    node.replace_all_uses_with(made)
    return True


def _erase_chain(node: fx.Node, source: fx.Node) -> None:
    while node is not source:
        before = node.all_input_nodes[0]
        node.graph.erase_node(node)
        node = before


def _value(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    values = fx.node.map_arg(args, lambda node: node.meta["val"])
    with values[0].fake_mode:
        made: torch.Tensor = target(*values, **kwargs)
    return made
