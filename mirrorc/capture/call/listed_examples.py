"""Recognizes lists with an item for each example, such as the targets of a detector, among the arguments of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.call.argument_markers import BatchDim, Examples, PerReplica, Replicated
from mirrorc.capture.call.containers import flatten_container

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
    return _each_marked(args, kwargs, length, are_lists) if length is not None else (args, kwargs)


def _each_marked(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int, are_lists: bool
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
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
