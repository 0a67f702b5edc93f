"""Tracks which sizes of arguments change between calls and become symbols."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch

from mirrorc.capture.call.call_arguments import Call, Leaf
from mirrorc.capture.call.shard_types import FEWEST_SYMBOLIC, SymbolicDims
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import dims_marked_by_user

_MOST_PROGRAMS = 8  # with symbols, for calls of one kind: torch may add guards that few sizes meet

logger = logging.getLogger(__name__)


@dataclass
class _SizeHistory:
    """The sizes that one dimension of an argument has had.

    Attributes:
        sizes: the sizes in the first call.
        spared: sizes in one later call that do not make the dimension symbolic.
    """

    sizes: frozenset[int] = frozenset()
    spared: frozenset[int] = frozenset()
    is_symbolic: bool = False

    def add(self, sizes: Iterable[int], *, spares_larger: bool | None = None) -> None:
        """``spares_larger`` says, for numbers of examples, whether the second call's are spared even if larger; else None."""
        new = {size for size in sizes if size >= FEWEST_SYMBOLIC} - self.sizes - self.spared
        if self.is_symbolic or not new:
            return
        if not self.sizes:
            self.sizes = frozenset(new)
        elif spares_larger is not None and not self.spared and (spares_larger or max(new) < max(self.sizes)):
            self.spared = frozenset(new)
        else:
            self.is_symbolic = True


class ChangingSizes:
    """The dimensions of arguments whose sizes change between calls, for each kind of call.

    A dimension becomes a symbol at its second size. Sizes of 0 and 1 do not count, nor does one shorter batch, or one
    larger batch where only the number of examples changes: a resumed training may begin with the short last batch, and
    must have the bits of an uninterrupted training.

    Args:
        dynamic: None for this rule; True for symbols from the first call on; False for symbols only where
            `torch._dynamo.mark_dynamic` marks a dimension.
    """

    def __init__(self, *, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self._seen: dict[Hashable, list[list[_SizeHistory]]] = {}
        self._refusals: dict[Hashable, str] = {}  # reasons, by the kind of a call and whether a shard has one example
        self._num_programs: dict[Hashable, int] = {}

    def symbolic_dims(self, call: Call, purpose: Hashable, *, has_one_example: bool = False) -> SymbolicDims:
        key = _kind(call, purpose)
        if (key, has_one_example) in self._refusals:
            return ()
        seen = self._seen.setdefault(key, [[_SizeHistory() for _ in range(_rank(leaf))] for leaf in call.leaves])
        for leaf, dims in zip(call.leaves, seen, strict=True):
            for dim, sizes in enumerate(dims):
                self._note_marks(leaf, dim, sizes)
                if self._dynamic is not False and not _counts_examples(leaf, dim):
                    sizes.add(_sizes(leaf, dim))
        others = [sizes.is_symbolic for leaf, dims in zip(call.leaves, seen, strict=True) for sizes in dims]
        if self._dynamic is not False:
            for leaf, dims in zip(call.leaves, seen, strict=True):
                if leaf.split and dims:
                    dims[0].add(_sizes(leaf, 0), spares_larger=not any(others))
        return _unless_empty(frozenset(dim for dim, sizes in enumerate(dims) if sizes.is_symbolic) for dims in seen)

    def _note_marks(self, leaf: Leaf, dim: int, sizes: _SizeHistory) -> None:
        marked = [tensor.shape[dim] for tensor in _tensors(leaf) if dim in dims_marked_by_user(tensor)]
        sizes.is_symbolic = sizes.is_symbolic or bool(marked) or bool(self._dynamic)
        if marked and min(marked) < FEWEST_SYMBOLIC:
            _warn_of_marked(leaf.path, dim, min(marked))

    def note_program(self, call: Call, purpose: Hashable) -> None:
        """After `_MOST_PROGRAMS` programs with symbols, sizes in such calls are numbers."""
        key = _kind(call, purpose)
        self._num_programs[key] = self._num_programs.get(key, 0) + 1
        if self._num_programs[key] >= _MOST_PROGRAMS:
            why = f"each of {_MOST_PROGRAMS} programs with symbols was right for few sizes alone"
            self.give_up(call, purpose, why)
            self.give_up(call, purpose, why, has_one_example=True)

    def give_up(self, call: Call, purpose: Hashable, why: str, *, has_one_example: bool = False) -> None:
        logger.info("sizes of arguments are numbers in each program: %s", why)
        self._refusals.setdefault((_kind(call, purpose), has_one_example), why)

    def why_not(self, call: Call, purpose: Hashable, *, has_one_example: bool = False) -> str:
        """Why sizes in such calls are numbers; empty if they may be symbols."""
        return self._refusals.get((_kind(call, purpose), has_one_example), "")


def without_numbers_of_examples(call: Call, dims: SymbolicDims) -> SymbolicDims:
    if not dims:
        return ()
    return _unless_empty(
        frozenset(dim for dim in symbolic if not _counts_examples(leaf, dim))
        for leaf, symbolic in zip(call.leaves, dims, strict=True)
    )


def _unless_empty(dims: Iterable[frozenset[int]]) -> SymbolicDims:
    dims_of_leaves = tuple(dims)
    return dims_of_leaves if any(dims_of_leaves) else ()


def _warn_of_marked(path: str, dim: int, size: int) -> None:
    warnings.warn(
        message(
            f"MC3401: dim {dim} of argument {path!r} is marked by mark_dynamic, and its size is {size}",
            "sizes of 0 and 1 are numbers in a program, because torch makes other graphs for them",
            now="it is a symbol from the first larger size on",
        ),
        stacklevel=users_stack_level(),
    )


def _kind(call: Call, purpose: Hashable) -> Hashable:
    types = tuple((_rank(leaf), next(iter(_tensors(leaf))).dtype, leaf.split) for leaf in call.leaves)
    return purpose, call.structure, types


def _tensors(leaf: Leaf) -> Iterable[torch.Tensor]:
    return leaf.per_replica if leaf.tensor is None else (leaf.tensor,)


def _sizes(leaf: Leaf, dim: int) -> list[int]:
    return [tensor.shape[dim] for tensor in _tensors(leaf)]


def _counts_examples(leaf: Leaf, dim: int) -> bool:
    return leaf.split and dim == 0


def _rank(leaf: Leaf) -> int:
    return next(iter(_tensors(leaf))).dim()
