"""Tracks which sizes of arguments change between calls and become symbols."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
class _Sizes:
    """The sizes of one dimension of an argument. Those of 0 and 1 do not count.

    Attributes:
        first: in the first call; empty for a dimension that is a symbol from its first call on.
    """

    first: frozenset[int] = frozenset()
    are_symbolic: bool = False

    def add(self, sizes: frozenset[int]) -> None:
        if not self.first and not self.are_symbolic:
            self.first = sizes
        self.are_symbolic = self.are_symbolic or not sizes <= self.first

    def make_symbolic(self) -> None:
        self.first, self.are_symbolic = frozenset(), True


class ChangingSizes:
    """The dimensions of arguments whose sizes change between calls, for each kind of call.

    A dimension becomes a symbol at its second size. The sizes of the first call keep a program of their own. Numbers of
    examples of an evaluation are symbols from the first call on.

    Args:
        dynamic: None for this rule; True for symbols from the first call on; False for symbols only where
            `torch._dynamo.mark_dynamic` marks a dimension.
    """

    def __init__(self, *, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self._seen: dict[str, list[list[_Sizes]]] = {}
        self._refusals: dict[Hashable, str] = {}  # reasons, by the kind of a call and whether a shard has one example
        self._num_programs: dict[str, int] = {}

    def symbolic_dims(
        self, call: Call, purpose: str, *, has_one_example: bool = False, is_evaluation: bool = False
    ) -> SymbolicDims:
        """Empty for the sizes of the first call, unless they are symbols from the first call on."""
        key = _kind(call, purpose)
        if (key, has_one_example) in self._refusals:
            return ()
        seen = self._seen.setdefault(key, [[_Sizes() for _ in range(_rank(leaf))] for leaf in call.leaves])
        for leaf, dims in zip(call.leaves, seen, strict=True):
            for dim, sizes in enumerate(dims):
                self._add(leaf, dim, sizes, is_evaluation)
        if self.are_first(call, purpose):
            return ()
        return _unless_empty(frozenset(dim for dim, sizes in enumerate(dims) if sizes.are_symbolic) for dims in seen)

    def are_first(self, call: Call, purpose: str) -> bool:
        """True if a call has the sizes of the first call of its kind, which have a program of their own."""
        seen = self._seen.get(_kind(call, purpose), [])
        return any(map(bool, seen)) and all(
            _sizes(leaf, dim) <= sizes.first
            for leaf, dims in zip(call.leaves, seen, strict=True)
            for dim, sizes in enumerate(dims)
        )

    def _add(self, leaf: Leaf, dim: int, sizes: _Sizes, is_evaluation: bool) -> None:
        marked = [tensor.shape[dim] for tensor in _tensors(leaf) if dim in dims_marked_by_user(tensor)]
        if marked or self._dynamic or (self._dynamic is None and is_evaluation and _counts_examples(leaf, dim)):
            sizes.make_symbolic()
        elif self._dynamic is None:
            sizes.add(_sizes(leaf, dim))
        if marked and min(marked) < FEWEST_SYMBOLIC:
            _warn_of_marked(leaf.path, dim, min(marked))

    def state_dict(self) -> dict[str, list[list[tuple[list[int], bool]]]]:
        """By the kind of a call: for each dimension of each argument, its first sizes, and whether it is a symbol."""
        return {
            kind: [[(sorted(sizes.first), sizes.are_symbolic) for sizes in dims] for dims in seen]
            for kind, seen in self._seen.items()
        }

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[tuple[Iterable[int], bool]]]]) -> None:
        """Kinds of calls that this step has had already keep their sizes."""
        loaded = {
            kind: [[_Sizes(frozenset(first), is_symbolic) for first, is_symbolic in dims] for dims in seen]
            for kind, seen in state.items()
        }
        self._seen = {**loaded, **self._seen}

    def note_program(self, call: Call, purpose: str) -> None:
        """After `_MOST_PROGRAMS` programs with symbols, sizes in such calls are numbers."""
        key = _kind(call, purpose)
        self._num_programs[key] = self._num_programs.get(key, 0) + 1
        if self._num_programs[key] >= _MOST_PROGRAMS:
            why = f"each of {_MOST_PROGRAMS} programs with symbols was right for few sizes alone"
            self.give_up(call, purpose, why)
            self.give_up(call, purpose, why, has_one_example=True)

    def give_up(self, call: Call, purpose: str, why: str, *, has_one_example: bool = False) -> None:
        logger.info("sizes of arguments are numbers in each program: %s", why)
        self._refusals.setdefault((_kind(call, purpose), has_one_example), why)

    def why_not(self, call: Call, purpose: str, *, has_one_example: bool = False) -> str:
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


def _kind(call: Call, purpose: str) -> str:
    """The same text in each process."""
    tensors = [(leaf, next(iter(_tensors(leaf)))) for leaf in call.leaves]
    types = [f"{leaf.path}: {tensor.dtype}, {tensor.dim()} dims, {leaf.split}" for leaf, tensor in tensors]
    return "; ".join([purpose, *types])


def _tensors(leaf: Leaf) -> Iterable[torch.Tensor]:
    return leaf.per_replica if leaf.tensor is None else (leaf.tensor,)


def _sizes(leaf: Leaf, dim: int) -> frozenset[int]:
    return frozenset(tensor.shape[dim] for tensor in _tensors(leaf) if tensor.shape[dim] >= FEWEST_SYMBOLIC)


def _counts_examples(leaf: Leaf, dim: int) -> bool:
    return leaf.split and dim == 0


def _rank(leaf: Leaf) -> int:
    return next(iter(_tensors(leaf))).dim()
