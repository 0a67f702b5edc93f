"""Collectives that the model calls, over the replicas of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, name_of
from mirrorc.ir.program import Program
from mirrorc.runtime.communication.rendezvous import Rendezvous


class ReplicaValues:
    """Collectives of the model. Each present replica leaves a value, and takes the result of all values."""

    def __init__(self, program: Program, timeout_seconds: float) -> None:
        self._devices, self._present = program.devices, tuple(program.present)
        self._timeout_seconds = timeout_seconds
        meetings = [node for graph in program.graphs() for node in calls_to(graph, *ops.MEETINGS)]
        self._names = {number_of(node): f"{name_of(node)} {number_of(node)} of the model" for node in meetings}
        self.begin_afresh()

    def begin_afresh(self) -> None:
        self._meetings = {
            number: Rendezvous(subject, self._devices, self._timeout_seconds) for number, subject in self._names.items()
        }

    def abort(self) -> None:
        for meeting in self._meetings.values():
            meeting.abort()

    def reset(self) -> None:
        for meeting in self._meetings.values():
            meeting.tensors = [None] * len(self._devices)

    def arrive(self, node: fx.Node, replica: int, value: torch.Tensor) -> None:
        """Leaves a copy of a value, because the next region may overwrite it; never blocks."""
        meeting = self._meetings[number_of(node)]
        rows = node.kwargs["rows"] if node.target is ops.own_rows_of_sum else None
        meeting.tensors[replica] = (value.clone(memory_format=torch.contiguous_format), rows)
        for other in self._present:
            meeting.announce_to(other, replica)

    def leave(self, node: fx.Node, replica: int) -> torch.Tensor:
        meeting = self._meetings[number_of(node)]
        meeting.await_replicas(replica, self._present)
        left = [meeting.tensors[present] for present in self._present]
        return RESULTS[name_of(node)](
            [value for value, _ in left], [rows for _, rows in left], self._present.index(replica)
        )


def _sum(values: Sequence[torch.Tensor], rows: Sequence[Any], place: int) -> torch.Tensor:
    first, *others = values
    total = first.clone()
    for value in others:
        total += value
    return total


def _gathered(values: Sequence[torch.Tensor], rows: Sequence[Any], place: int) -> torch.Tensor:
    return torch.cat(list(values))


def _replica_rows(values: Sequence[torch.Tensor], rows: Sequence[int], place: int) -> torch.Tensor:
    return _sum([value.narrow(0, sum(rows[:place]), rows[place]) for value in values], rows, place)


RESULTS: dict[str, Callable[[Sequence[torch.Tensor], Sequence[Any], int], torch.Tensor]] = {
    ops.sum_over_replicas.__name__: _sum,
    ops.rows_of_replicas.__name__: _gathered,
    ops.own_rows_of_sum.__name__: _replica_rows,
}
"""For each operation, a function that computes a replica's result from all replicas' values and rows, and the replica's
index.
"""


def number_of(node: fx.Node) -> int:
    number: Any = node.kwargs["number"]
    return int(number)
