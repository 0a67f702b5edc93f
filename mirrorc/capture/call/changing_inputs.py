"""Tracks what changes between calls: sizes of arguments become symbols, numbers of Python and numpy become inputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.capture.call.call_arguments import Call, Leaf
from mirrorc.capture.call.shards import FEWEST_SYMBOLIC, SymbolicDims
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import dims_marked_by_user

_MOST_PROGRAMS = 8  # with symbols, for calls of one kind: torch may add guards that few sizes meet

logger = logging.getLogger(__name__)


Shapes = tuple[tuple[tuple[int, ...], ...], ...]
"""For each argument of a call: the shape of its tensor, or of each replica's tensor."""


@dataclass
class _Seen:
    """The sizes in calls of one kind.

    Attributes:
        first: the shapes of the first call; empty if it had symbolic dimensions.
        sizes: the first sizes of each dimension of each argument, without 0 and 1.
    """

    first: Shapes
    sizes: list[list[frozenset[int]]]
    symbolic: list[set[int]]


class ChangingSizes:
    """The dimensions of arguments whose sizes change between calls, for each kind of call.

    A dimension becomes a symbol at its second size. The shapes of the first call keep their own program. In an
    evaluation, the number of examples is a symbol from the first call on.

    Args:
        dynamic: None for this rule; True makes all dimensions symbols from the first call on; False, only those marked
            by `torch._dynamo.mark_dynamic`.
    """

    def __init__(self, *, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self._seen: dict[str, _Seen] = {}
        self._refusals: dict[Hashable, str] = {}  # reasons, by the kind of a call and whether a shard has one example
        self._num_programs: dict[str, int] = {}
        self._compiled: dict[Hashable, SymbolicDims] = {}  # of the last program, whole or in microbatches

    def symbolic_dims(
        self, call: Call, purpose: str, *, has_one_example: bool = False, is_evaluation: bool = False
    ) -> SymbolicDims:
        """The dimensions that become symbols.

        Empty after `give_up`, and for the shapes of a first call without symbolic dimensions.
        """
        key = _kind(call, purpose)
        if (key, has_one_example) in self._refusals:
            return ()
        seen = self._seen.get(key)
        if seen is None:
            ranks = [next(iter(_tensors(leaf))).dim() for leaf in call.leaves]
            none: list[list[frozenset[int]]] = [[frozenset()] * rank for rank in ranks]
            seen = self._seen[key] = _Seen(_shapes(call), none, [set() for _ in call.leaves])
        for leaf, sizes, symbolic in zip(call.leaves, seen.sizes, seen.symbolic, strict=True):
            if leaf.counts_items:
                continue  # a list has a length, not a symbol
            for dim, known in enumerate(sizes):
                marked = [tensor.shape[dim] for tensor in _tensors(leaf) if dim in dims_marked_by_user(tensor)]
                if marked and min(marked) < FEWEST_SYMBOLIC:
                    _warn_of_marked(leaf.path, dim, min(marked))
                is_first_symbol = is_evaluation and _counts_examples(leaf, dim)
                if marked or self._dynamic or (self._dynamic is None and is_first_symbol):
                    symbolic.add(dim)
                    seen.first = ()
                elif self._dynamic is None:
                    now = frozenset(t.shape[dim] for t in _tensors(leaf) if t.shape[dim] >= FEWEST_SYMBOLIC)
                    sizes[dim] = known or now
                    if not now <= sizes[dim]:
                        symbolic.add(dim)
        return () if _shapes(call) == seen.first else _unless_empty(map(frozenset, seen.symbolic))

    def compiled_dims(self, call: Call, purpose: str, *, has_microbatches: bool = False) -> SymbolicDims:
        """The symbolic dimensions of the newest program for a call; older programs have fewer, and are no longer used.

        Empty for the shapes of the first call.
        """
        kind = _kind(call, purpose)
        seen = self._seen.get(kind)
        return () if seen is None or _shapes(call) == seen.first else self._compiled.get((kind, has_microbatches), ())

    def state_dict(self) -> dict[str, Any]:
        return {
            kind: {
                "first": [[[*shape] for shape in shapes] for shapes in seen.first],
                "sizes": [[sorted(known) for known in sizes] for sizes in seen.sizes],
                "symbolic": [sorted(dims) for dims in seen.symbolic],
            }
            for kind, seen in self._seen.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Kinds of calls that this step has already run keep their sizes, because programs exist for them."""
        loaded = {
            kind: _Seen(
                tuple(tuple(map(tuple, shapes)) for shapes in seen["first"]),
                [list(map(frozenset, sizes)) for sizes in seen["sizes"]],
                [set(dims) for dims in seen["symbolic"]],
            )
            for kind, seen in state.items()
        }
        self._seen = {**loaded, **self._seen}

    def note_program(self, call: Call, purpose: str, symbolic: SymbolicDims, *, has_microbatches: bool) -> None:
        """After `_MOST_PROGRAMS` programs with symbols, sizes in calls of this kind become constants."""
        key = _kind(call, purpose)
        self._compiled[key, has_microbatches] = symbolic
        self._num_programs[key] = self._num_programs.get(key, 0) + 1
        if self._num_programs[key] >= _MOST_PROGRAMS:
            why = f"each of {_MOST_PROGRAMS} programs with symbols was right for few sizes alone"
            self.give_up(call, purpose, why)
            self.give_up(call, purpose, why, has_one_example=True)

    def give_up(self, call: Call, purpose: str, why: str, *, has_one_example: bool = False) -> None:
        logger.info("sizes of arguments are numbers in each program: %s", why)
        self._refusals.setdefault((_kind(call, purpose), has_one_example), why)

    @property
    def reasons(self) -> list[str]:
        return [f"sizes are numbers: {why}" for why in dict.fromkeys(self._refusals.values())]

    def why_not(self, call: Call, purpose: str, *, has_one_example: bool = False) -> str:
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
            f"{path} of size 2 or more along dim {dim} in the first call",
            now="it is a symbol from the first larger size on",
        ),
        stacklevel=users_stack_level(),
    )


def _kind(call: Call, purpose: str) -> str:
    """A key that is equal in all processes."""
    tensors = [(leaf, next(iter(_tensors(leaf)))) for leaf in call.leaves]
    types = [f"{leaf.path}: {tensor.dtype}, {tensor.dim()} dims, {leaf.split}" for leaf, tensor in tensors]
    return "; ".join([purpose, *types])


def _tensors(leaf: Leaf) -> Iterable[torch.Tensor]:
    return leaf.per_replica if leaf.tensor is None else (leaf.tensor,)


def _shapes(call: Call) -> Shapes:
    return tuple(tuple(tuple(tensor.shape) for tensor in _tensors(leaf)) for leaf in call.leaves)


def _counts_examples(leaf: Leaf, dim: int) -> bool:
    return leaf.split and dim == 0


class ChangingNumbers:
    """Numbers that have changed between calls of a step, by their Python expressions.

    A Python number is a constant of the first program, and a graph input from its second value on. Numpy's numbers are
    inputs from the start. A number that cannot be an input gets a program for each value.

    Attributes:
        can_be_drawn: random numbers that Python draws become inputs. False with CUDA graphs, which replay draws.
    """

    def __init__(self, *, can_be_inputs: bool = True) -> None:
        self._can_be_inputs = self.can_be_drawn = can_be_inputs
        self._names: set[str] = set()
        self._given_up: dict[str, str] = {}

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset(self._names - self._given_up.keys()) if self._can_be_inputs else frozenset()

    @property
    def constants(self) -> frozenset[str] | None:
        """The numbers that cannot be inputs; None if no number can."""
        return frozenset(self._given_up) if self._can_be_inputs else None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        before, self._can_be_inputs = self._can_be_inputs, False
        try:
            yield
        finally:
            self._can_be_inputs = before

    def add(self, names: Iterable[str]) -> None:
        self._names.update(names)

    def give_up(self, names: Collection[str], why: str, words: Sequence[str] = ()) -> None:
        """Makes numbers constants from now on; ``words`` are the user's names for them."""
        logger.info("%s: constant in each program, because %s", ", ".join(sorted(names)), why)
        for name in names:
            self._given_up.setdefault(name, f"{' and '.join(words)}: {why}" if words else why)

    @property
    def reasons(self) -> list[str]:
        return list(dict.fromkeys(self._given_up.values()))
