"""Finds where the replicas of a worker meet those of the others, as the model asks for it, and how many rows they have there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, name_of, operation_name
from mirrorc.ir.program import Program
from mirrorc.ir.routes import replica_at

_OF_ROWS = (ops.rows_of_replicas, ops.own_rows_of_sum)
NO_CLAIM = -1


@dataclass(frozen=True)
class WorkerMeeting:
    """A meeting of the replicas of all workers, as one worker's program has it.

    Attributes:
        number: tells it from others.
        name: of the operation.
        shape: of what is added up, or of all rows.
        dtype: of the values.
        rows: those that this worker's replicas have; None if all replicas have values of one shape.
        before: those of the workers before it, or `NO_CLAIM`.
        first: the first node of it.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    rows: int | None
    before: int
    first: fx.Node

    @property
    def line(self) -> str:
        """What all workers must have alike of it."""
        shape = list(self.shape) if self.rows is None else ["rows", *self.shape[1:]]
        return f"{self.name} {self.number} {self.dtype} {', '.join(map(str, shape))}"


def worker_meetings(program: Program) -> list[WorkerMeeting]:
    """The meetings of a program with the replicas of other workers, in order; none of a program that meets no others."""
    if not program.meets_workers:
        return []
    graphs = (
        [program.graph] if program.graph is not None else [module.graph for module in program.device_graphs.values()]
    )
    nodes = [node for graph in graphs for node in calls_to(graph, *ops.ATTENDED)]
    first = [node for node in nodes if replica_at(program, node) == program.first_present]
    return [_meeting(node, [other for other in nodes if _number(other) == _number(node)]) for node in first]


def _meeting(node: fx.Node, everyone: Sequence[fx.Node]) -> WorkerMeeting:
    words: Any = node.kwargs
    if node.target is ops.attend:
        is_of_rows = words["meeting"] in {operation_name(one) for one in _OF_ROWS}
        rows = 0 if is_of_rows else None
        return WorkerMeeting(
            _number(node), words["meeting"], tuple(words["shape"]), words["dtype"], rows, NO_CLAIM, node
        )
    value = (node if node.target is ops.rows_of_replicas else node.all_input_nodes[0]).meta["val"]
    own = sum(map(rows_of_meeting, everyone)) if node.target in _OF_ROWS else None
    before = words.get("before", 0) if node.target in _OF_ROWS else NO_CLAIM
    return WorkerMeeting(_number(node), name_of(node), tuple(value.shape), value.dtype, own, before, node)


def meetings_of_rows(graph: fx.Graph) -> list[fx.Node]:
    """The meetings of a graph in which replicas may have different numbers of rows, in program order."""
    return list(calls_to(graph, *_OF_ROWS))


def rows_of_meeting(node: fx.Node) -> int:
    """How many rows a replica has in a meeting of rows."""
    rows: Any = node.kwargs["rows"]
    return int(rows) if node.target is ops.own_rows_of_sum else len(node.all_input_nodes[0].meta["val"])


def _number(node: fx.Node) -> int:
    number: Any = node.kwargs["number"]
    return int(number)


# What workers tell each other of them

RowsElsewhere = tuple[tuple[int, int], ...]
"""For each meeting of rows in program order, how many rows the workers before this one have, and those behind it."""


def rows_told(program: Program) -> tuple[int, ...]:
    """For each meeting of rows: how many this worker has, how many the program takes the workers before it to have, and all."""
    found = [one for one in worker_meetings(program) if one.rows is not None]
    return tuple(number for one in found for number in (one.rows or 0, one.before, one.shape[0]))


def no_rows_told(program: Program) -> tuple[int, ...]:
    """As `rows_told`, of a worker that has left, which takes the others to have what they will tell."""
    return (0, NO_CLAIM, NO_CLAIM) * sum(one.rows is not None for one in worker_meetings(program))


def rows_agree(told: Sequence[Sequence[int]]) -> bool:
    """Whether the programs of all workers, by rank, are those for the rows that all have."""
    for place in range(0, len(told[0]), 3):
        own = [one[place] for one in told]
        for rank, one in enumerate(told):
            claims = one[place + 1], one[place + 2]
            true = sum(own[:rank]), sum(own)
            if any(claim not in (NO_CLAIM, fact) for claim, fact in zip(claims, true, strict=True)):
                return False
    return True


def rows_elsewhere(told: Sequence[Sequence[int]], rank: int) -> RowsElsewhere:
    """What the workers besides one have, of what all have told by rank."""
    places = range(0, len(told[0]), 3)
    return tuple((sum(one[i] for one in told[:rank]), sum(one[i] for one in told[rank + 1 :])) for i in places)
