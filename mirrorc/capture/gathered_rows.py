"""Finds how many rows all replicas gather together, which each of their graphs must say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.capture.captured_graph import CapturedGraph
from mirrorc.custom_ops.replica_values import RowsOfAll
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.printing.values import type_of

_MOST_CAPTURES = 4
_Key = tuple[int, tuple[Any, ...], torch.dtype]


class GatheredRows:
    """How many rows all replicas have together, where the replica of a shard gathers so many.

    A first guess takes it that rows follow the examples, if they are a multiple of them, and otherwise that each replica has as
    many. What graphs have then been found to gather replaces it: replicas whose shards are uneven may gather as many rows each.
    Values of one type are told from those of others alone.

    Args:
        num_examples: of each replica; those without examples gather nothing.
        runs: for each replica, the graphs that it runs, of which it is asked for the first.
    """

    def __init__(self, num_examples: Sequence[int], runs: Sequence[Sequence[int]]) -> None:
        self._sizes = [size for size, own in zip(num_examples, runs, strict=True) if own]
        self._shards = [own[0] for own in runs if own]
        self._known: dict[_Key, int] = {}

    def of(self, shard: int, more: int = 0) -> RowsOfAll:
        """What gives the rows of all replicas in a trace of a shard, or of one with so many more examples."""

        def rows_of_all(value: torch.Tensor) -> int:
            rows = len(value)
            if shard not in self._shards:
                return rows  # of a graph that nobody runs
            num_examples = self._sizes[self._shards.index(shard)] + more
            guess = rows // num_examples * sum(self._sizes) if not rows % num_examples else rows * len(self._sizes)
            return guess if more else self._known.get(_key(shard, value), guess)

        return rows_of_all

    def settled(self, capture_all: Callable[[], list[CapturedGraph]], what: str) -> list[CapturedGraph]:
        """Captures until graphs say what they gather together, which they mostly do at once.

        Raises:
            CaptureError: they never do, or one gathers as many rows twice, and others do not.
        """
        for _ in range(_MOST_CAPTURES):
            captured = capture_all()
            if self._learn(captured, what):
                return captured
        raise CaptureError(
            f"how many rows {what} gathers by mirrorc.all_gather follows from how many all replicas have gathered before, "
            "without end. Remedy: use batches that divide by the number of devices"
        )

    def _learn(self, captured: Sequence[CapturedGraph], what: str) -> bool:
        """Takes over what graphs gather; gives whether that is what they say."""
        met = [list(calls_to(one.graph, ops.rows_of_replicas)) for one in captured]
        found: dict[_Key, int] = {}
        agrees = True
        for place in range(min((len(met[shard]) for shard in self._shards), default=0)):
            nodes = [met[shard][place] for shard in self._shards]
            values = [node.all_input_nodes[0].meta["val"] for node in nodes]
            rows = sum(map(len, values))
            for shard, value in zip(self._shards, values, strict=True):
                if found.setdefault(_key(shard, value), rows) != rows:
                    raise CaptureError(
                        f"{what} gathers {type_of(value)} twice on one replica, which is {found[_key(shard, value)]} rows of all "
                        f"replicas in one place and {rows} in another, and no trace can tell which is which. Remedy: use batches "
                        "that divide by the number of devices, or give one of the two another dimension"
                    )
            agrees = agrees and all(node.kwargs["rows"] == rows for node in nodes)
        self._known |= found
        return agrees


def _key(shard: int, value: torch.Tensor) -> _Key:
    return shard, tuple(value.shape), value.dtype
