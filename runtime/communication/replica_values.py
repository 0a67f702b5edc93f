"""Collectives that the model calls, over the replicas of a process: those of graphs, and those of plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mirrorc.custom_ops.replica_collectives import GATHER
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.nodes import calls_to, name_of
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication.rendezvous import Aborted, Rendezvous, too_late


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
        values, rows = [value for value, _ in left], [rows for _, rows in left]
        return RESULTS[name_of(node)](values, rows, self._present.index(replica))


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
"""By operation: computes a replica's result from all replicas' values and rows, and the replica's index."""


def number_of(node: fx.Node) -> int:
    number: Any = node.kwargs["number"]
    return int(number)


class _Arrival(NamedTuple):
    subject: str
    kind: str
    value: torch.Tensor
    rows: int

    @property
    def type(self) -> tuple[Any, ...]:
        shape = tuple(self.value.shape)
        return shape[1:] if self.kind == GATHER else shape, self.value.dtype


class PlainExchanges:
    """Exchanges in rounds: each present replica waits for all others.

    No graph lists the exchanges, so each round checks that all replicas have reached the same one.
    """

    def __init__(self, devices: Sequence[Device], present: Sequence[int], timeout_seconds: float) -> None:
        self._devices, self._present, self._timeout_seconds = devices, tuple(present), timeout_seconds
        self._condition = threading.Condition()
        self.begin_afresh()

    def begin_afresh(self) -> None:
        self._is_aborted, self._round = False, 0
        self.reset()

    def abort(self) -> None:
        with self._condition:
            self._is_aborted = True
            self._condition.notify_all()

    def reset(self) -> None:
        self._arrivals: dict[int, _Arrival] = {}
        self._met: Sequence[_Arrival] = ()  # of the last round, until all have come to the next one

    def of(self, replica: int) -> OneOfReplicas:
        return OneOfReplicas(self, replica, self._present.index(replica), len(self._present))

    def meet(self, replica: int, place: int, arrival: _Arrival) -> torch.Tensor:
        met = self._await_round(replica, arrival)
        self._check(met)
        if not arrival.kind:
            return arrival.value
        return RESULTS[arrival.kind]([other.value for other in met], [other.rows for other in met], place)

    def _await_round(self, replica: int, arrival: _Arrival) -> Sequence[_Arrival]:
        with self._condition:
            number = self._round
            self._arrivals[replica] = arrival
            if len(self._arrivals) == len(self._present):
                self._met, self._arrivals = [self._arrivals[r] for r in self._present], {}
                self._round += 1
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: self._round != number or self._is_aborted, self._timeout_seconds):
                missing = [self._devices[r] for r in self._present if r not in self._arrivals]
                raise too_late(self._devices[replica], self._timeout_seconds, arrival.subject, missing)
            if self._round == number:
                raise Aborted
            return self._met

    def _check(self, met: Sequence[_Arrival]) -> None:
        first = met[0]
        for replica, arrival in zip(self._present, met, strict=True):
            if (arrival.subject, arrival.kind) != (first.subject, first.kind):
                raise problem(
                    ExecutionError,
                    f"MC2503: {self._devices[self._present[0]]} came to {first.subject}, and {self._devices[replica]} to "
                    f"{arrival.subject}",
                    "replicas with different exchanges would wait for each other",
                    "mirrorc.all_reduce(value) and the like outside of any if, in one order",
                )
            if arrival.type != first.type:
                raise problem(
                    ExecutionError,
                    f"MC2503: {first.subject} is given different types on two replicas",
                    f"{_say(first)} and {_say(arrival)} do not go together",
                    "mirrorc.all_reduce(value.sum(0)), or mirrorc.all_gather(value)",
                )


class OneOfReplicas:
    """The other replicas, for one replica."""

    number = 0

    def __init__(self, exchanges: PlainExchanges, replica: int, place: int, count: int) -> None:
        self._exchanges, self._replica, self.place, self.count = exchanges, replica, place, count

    def meet_at(self, subject: str, kind: str, value: torch.Tensor, rows: int) -> torch.Tensor:
        """Leaves a copy, because this replica may overwrite the value before others have read it."""
        copy = value.clone(memory_format=torch.contiguous_format)
        return self._exchanges.meet(self._replica, self.place, _Arrival(subject, kind, copy, rows))

    def meet(self, kind: str, value: torch.Tensor, rows: int, origin: int | None) -> torch.Tensor:
        return self.meet_at("", kind, value, rows)


def _say(arrival: _Arrival) -> str:
    return f"{str(arrival.value.dtype).removeprefix('torch.')}{list(arrival.value.shape)}"
