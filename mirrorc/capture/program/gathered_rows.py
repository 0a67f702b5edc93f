"""The number of rows that all replicas gather, a constant in each graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere, meetings_of_rows, rows_of_meeting
from mirrorc.capture.call.shards import STAND_IN_SIZE
from mirrorc.capture.diagnostics.capture_errors import EVEN_BATCHES
from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.custom_ops.replica_collectives import RowsOfAll
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.workers import ALONE, Workers
from mirrorc.messages.problem import problem
from mirrorc.printing.printed_values import type_of

_MOST_CAPTURES = 4
_Key = tuple[int, tuple[Any, ...], torch.dtype]


class GatheredRows:
    """The number of rows that all replicas gather, by the rows of one replica.

    If a replica's rows are a multiple of its examples, the first guess is that rows are proportional to examples;
    otherwise, that all replicas have equally many. Captured graphs replace the guess. Other workers are guessed to have
    as many rows per device as this one, until they report.
    """

    def __init__(
        self,
        num_examples: Sequence[int],
        runs: Sequence[Sequence[int]],
        workers: Workers = ALONE,
        elsewhere: RowsElsewhere | None = None,
    ) -> None:
        self._sizes = [size for size, graphs in zip(num_examples, runs, strict=True) if graphs]
        self._shards = [graphs[0] for graphs in runs if graphs]
        self._workers, self._elsewhere = workers, elsewhere
        self._known: dict[_Key, int] = {}

    @property
    def num_replicas(self) -> int:
        """The number of this worker's replicas with examples."""
        return max(len(self._sizes), 1)

    def of(self, shard: int, more: int = 0) -> RowsOfAll:
        """Maps a value to the rows of all replicas, for a trace of ``shard`` with ``more`` additional examples."""

        def rows_of_all(value: torch.Tensor) -> int:
            rows = len(value)
            is_run = shard in self._shards  # otherwise no replica runs the graph
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

    def capture_until_stable(
        self, capture_all: Callable[[], list[CapturedGraph]], model_name: str
    ) -> list[CapturedGraph]:
        for _ in range(_MOST_CAPTURES):
            captured = capture_all()
            if self._learn(captured, model_name):
                self._note_places(captured)
                return captured
        raise problem(
            CaptureError,
            f"MC2503: {model_name} gathers as many rows by mirrorc.all_gather as an earlier one decides",
            "with shards of different sizes this number has no upper limit",
            EVEN_BATCHES,
        )

    def _learn(self, captured: Sequence[CapturedGraph], model_name: str) -> bool:
        met = [meetings_of_rows(graph.graph) for graph in captured]
        stands_in = [0] if self._elsewhere is not None else []  # the graph of a worker without examples
        shards = self._shards or stands_in
        totals: dict[_Key, int] = {}
        agrees = True
        for place in range(min((len(met[shard]) for shard in shards), default=0)):
            nodes = [met[shard][place] for shard in shards]
            if any(node.target is not ops.rows_of_replicas for node in nodes):
                continue
            values = [node.all_input_nodes[0].meta["val"] for node in nodes]
            local_rows = sum(map(len, values)) if self._shards else 0
            rows = local_rows + sum(self._rows_elsewhere(place, len(met[shards[0]]), local_rows))
            for shard, value in zip(shards, values, strict=True):
                if totals.setdefault(_key(shard, value), rows) != rows:
                    alike = "give each worker as many examples" if self._workers.are_several else EVEN_BATCHES
                    raise problem(
                        CaptureError,
                        f"MC2503: {model_name} gathers {type_of(value)} twice on one replica, of different "
                        "numbers of rows in all",
                        f"it is {totals[_key(shard, value)]} rows in one place and {rows} in another, and no "
                        "trace tells which is which",
                        (alike, "gather one of the two with another shape, value[:, None]"),
                    )
            agrees = agrees and all(node.kwargs["rows"] == rows for node in nodes)
        self._known |= totals
        return agrees

    def _note_places(self, captured: Sequence[CapturedGraph]) -> None:
        if not self._workers.are_several:
            return
        met = [meetings_of_rows(graph.graph) for graph in captured]
        for place in range(min(map(len, met), default=0)):
            local_rows = sum(rows_of_meeting(met[shard][place]) for shard in self._shards)
            before, _ = self._rows_elsewhere(place, len(met[0]), local_rows)
            for nodes in met:
                nodes[place].kwargs = {**nodes[place].kwargs, "before": before}

    def _rows_elsewhere(self, place: int, num_meetings: int, local_rows: int) -> tuple[int, int]:
        if self._elsewhere is not None and len(self._elsewhere) == num_meetings:
            return self._elsewhere[place]
        return self._guessed_elsewhere(local_rows)

    def _guessed_elsewhere(self, local_rows: int) -> tuple[int, int]:
        devices, rank = self._workers.devices_per_worker, self._workers.rank
        if not self._workers.are_several:
            return 0, 0
        return local_rows * sum(devices[:rank]) // devices[rank], local_rows * sum(devices[rank + 1 :]) // devices[rank]


def _key(shard: int, value: torch.Tensor) -> _Key:
    return shard, tuple(value.shape), value.dtype
