"""Finds how many rows all replicas gather together, those of other workers included, which each of their graphs must say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere, meetings_of_rows, rows_of_meeting
from mirrorc.capture.call.shard_types import STAND_IN_SIZE
from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.custom_ops.replica_values import RowsOfAll
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.workers import ALONE, Workers
from mirrorc.printing.values import type_of

_MOST_CAPTURES = 4
_DIVIDE = "use batches that divide by the number of devices"
_Key = tuple[int, tuple[Any, ...], torch.dtype]


class GatheredRows:
    """How many rows all replicas have together, where the replica of a shard gathers so many.

    A first guess takes it that rows follow the examples, if they are a multiple of them, and otherwise that each replica has as
    many. What graphs have then been found to gather replaces it: replicas whose shards are uneven may gather as many rows each.
    Values of one type are told from those of others alone.

    What other workers gather is what they have told; before that, they are taken to gather as many rows with each device as this
    one does. A worker without examples gathers none, and its graph, which nobody runs, says what the others gather.

    Args:
        num_examples: of each replica; those without examples gather nothing.
        runs: for each replica, the graphs that it runs, of which it is asked for the first.
        workers: whose replicas gather together.
        elsewhere: what the other workers have told; None if they have told nothing yet.
    """

    def __init__(
        self,
        num_examples: Sequence[int],
        runs: Sequence[Sequence[int]],
        workers: Workers = ALONE,
        elsewhere: RowsElsewhere | None = None,
    ) -> None:
        self._sizes = [size for size, own in zip(num_examples, runs, strict=True) if own]
        self._shards = [own[0] for own in runs if own]
        self._workers, self._elsewhere = workers, elsewhere
        self._known: dict[_Key, int] = {}

    def of(self, shard: int, more: int = 0) -> RowsOfAll:
        """What gives the rows of all replicas in a trace of a shard, or of one with so many more examples."""

        def rows_of_all(value: torch.Tensor) -> int:
            rows = len(value)
            is_run = shard in self._shards  # otherwise nobody runs the graph
            num_examples = self._sizes[self._shards.index(shard)] if is_run else STAND_IN_SIZE
            follow = not rows % (num_examples + more)
            fewer = rows // (num_examples + more) * num_examples if follow else rows
            known = self._known.get((shard, (fewer, *value.shape[1:]), value.dtype))
            if known is not None:
                return known
            if not is_run:
                return rows
            guess = rows // (num_examples + more) * sum(self._sizes) if follow else rows * len(self._sizes)
            return guess + sum(self._guessed_elsewhere(guess))

        return rows_of_all

    def settled(self, capture_all: Callable[[], list[CapturedGraph]], what: str) -> list[CapturedGraph]:
        """Captures until graphs say what they gather together, which they mostly do at once.

        Raises:
            CaptureError: they never do, or one gathers as many rows twice, and others do not.
        """
        for _ in range(_MOST_CAPTURES):
            captured = capture_all()
            if self._learn(captured, what):
                self._note_places(captured)
                return captured
        raise CaptureError(
            f"how many rows {what} gathers by mirrorc.all_gather follows from how many all replicas have gathered before, "
            f"without end. Remedy: {_DIVIDE}"
        )

    def _learn(self, captured: Sequence[CapturedGraph], what: str) -> bool:
        """Takes over what graphs gather; gives whether that is what they say."""
        met = [meetings_of_rows(one.graph) for one in captured]
        stands_in = [0] if self._elsewhere is not None else []  # the graph of a worker without examples
        shards = self._shards or stands_in
        found: dict[_Key, int] = {}
        agrees = True
        for place in range(min((len(met[shard]) for shard in shards), default=0)):
            nodes = [met[shard][place] for shard in shards]
            if any(node.target is not ops.rows_of_replicas for node in nodes):
                continue
            values = [node.all_input_nodes[0].meta["val"] for node in nodes]
            own = sum(map(len, values)) if self._shards else 0
            rows = own + sum(self._told_elsewhere(place, len(met[shards[0]]), own))
            for shard, value in zip(shards, values, strict=True):
                if found.setdefault(_key(shard, value), rows) != rows:
                    alike = "give each worker as many examples" if self._workers.are_several else _DIVIDE
                    raise CaptureError(
                        f"{what} gathers {type_of(value)} twice on one replica, which is {found[_key(shard, value)]} rows of all "
                        f"replicas in one place and {rows} in another, and no trace can tell which is which. Remedy: "
                        f"{alike}, or give one of the two another dimension"
                    )
            agrees = agrees and all(node.kwargs["rows"] == rows for node in nodes)
        self._known |= found
        return agrees

    def _note_places(self, captured: Sequence[CapturedGraph]) -> None:
        """Notes in graphs how many rows the workers before this one have."""
        if not self._workers.are_several:
            return
        met = [meetings_of_rows(one.graph) for one in captured]
        for place in range(min(map(len, met), default=0)):
            own = sum(rows_of_meeting(met[shard][place]) for shard in self._shards)
            before, _ = self._told_elsewhere(place, len(met[0]), own)
            for nodes in met:
                nodes[place].kwargs = {**nodes[place].kwargs, "before": before}

    def _told_elsewhere(self, place: int, num_meetings: int, own: int) -> tuple[int, int]:
        """What the workers before this one, and those behind it, have in a meeting; a guess, if they have told nothing."""
        if self._elsewhere is not None and len(self._elsewhere) == num_meetings:
            return self._elsewhere[place]
        return self._guessed_elsewhere(own)

    def _guessed_elsewhere(self, own: int) -> tuple[int, int]:
        devices, rank = self._workers.devices_per_worker, self._workers.rank
        if not self._workers.are_several:
            return 0, 0
        return own * sum(devices[:rank]) // devices[rank], own * sum(devices[rank + 1 :]) // devices[rank]


def _key(shard: int, value: torch.Tensor) -> _Key:
    return shard, tuple(value.shape), value.dtype
