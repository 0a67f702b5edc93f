"""The model's collectives over the replicas of all workers, and a worker's schedule of communication."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to, name_of, operation_name, pack_of
from mirrorc.ir.program import Program
from mirrorc.ir.routes import replica_at

_OF_ROWS = (ops.rows_of_replicas, ops.own_rows_of_sum)
NO_CLAIM = -1


@dataclass(frozen=True)
class WorkerMeeting:
    """A collective of the model over the replicas of all workers.

    Attributes:
        rows: this worker's number of rows; None if all values have one shape.
        before: the number of rows of earlier workers, or `NO_CLAIM`.
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
        shape = list(self.shape) if self.rows is None else ["rows", *self.shape[1:]]
        return f"{self.name} {self.number} {self.dtype} {', '.join(map(str, shape))}"


def worker_meetings(program: Program) -> list[WorkerMeeting]:
    if not program.meets_workers:
        return []
    modules = program.device_graphs.values()
    graphs = [program.graph] if program.graph is not None else [module.graph for module in modules]
    nodes = [node for graph in graphs for node in calls_to(graph, *ops.ATTENDED)]
    first = [node for node in nodes if replica_at(program, node) == program.first_present]
    return [_meeting(node, [other for other in nodes if _number(other) == _number(node)]) for node in first]


def _meeting(node: fx.Node, everyone: Sequence[fx.Node]) -> WorkerMeeting:
    words: Any = node.kwargs
    if node.target is ops.attend:
        is_of_rows = words["meeting"] in {operation_name(operation) for operation in _OF_ROWS}
        rows = 0 if is_of_rows else None
        return WorkerMeeting(
            _number(node), words["meeting"], tuple(words["shape"]), words["dtype"], rows, NO_CLAIM, node
        )
    value = (node if node.target is ops.rows_of_replicas else node.all_input_nodes[0]).meta["val"]
    num_rows = sum(map(rows_of_meeting, everyone)) if node.target in _OF_ROWS else None
    before = words.get("before", 0) if node.target in _OF_ROWS else NO_CLAIM
    return WorkerMeeting(_number(node), name_of(node), tuple(value.shape), value.dtype, num_rows, before, node)


def meetings_of_rows(graph: fx.Graph) -> list[fx.Node]:
    return list(calls_to(graph, *_OF_ROWS))


def rows_of_meeting(node: fx.Node) -> int:
    rows: Any = node.kwargs["rows"]
    return int(rows) if node.target is ops.own_rows_of_sum else len(node.all_input_nodes[0].meta["val"])


def _number(node: fx.Node) -> int:
    number: Any = node.kwargs["number"]
    return int(number)


# What workers tell each other about rows

RowsElsewhere = tuple[tuple[int, int], ...]
"""For each gather, the numbers of rows of workers with lower ranks, and with higher ranks."""


def gathered_rows(program: Program) -> tuple[int, ...]:
    """For each gather, three numbers: this worker's rows, the rows assumed for lower ranks, and the assumed total."""
    meetings = [meeting for meeting in worker_meetings(program) if meeting.rows is not None]
    return tuple(number for meeting in meetings for number in (meeting.rows or 0, meeting.before, meeting.shape[0]))


def no_gathered_rows(program: Program) -> tuple[int, ...]:
    """The `gathered_rows` of a worker whose loop has ended, without assumptions about other workers."""
    return (0, NO_CLAIM, NO_CLAIM) * sum(meeting.rows is not None for meeting in worker_meetings(program))


def rows_agree(claims: Sequence[Sequence[int]]) -> bool:
    """True if all workers assume the right numbers of rows. ``claims``: each worker's `gathered_rows`, by rank."""
    for place in range(0, len(claims[0]), 3):
        rows = [claim[place] for claim in claims]
        for rank, claim in enumerate(claims):
            assumed = claim[place + 1], claim[place + 2]
            true = sum(rows[:rank]), sum(rows)
            if any(number not in (NO_CLAIM, fact) for number, fact in zip(assumed, true, strict=True)):
                return False
    return True


def rows_elsewhere(claims: Sequence[Sequence[int]], rank: int) -> RowsElsewhere:
    places = range(0, len(claims[0]), 3)
    lower, higher = claims[:rank], claims[rank + 1 :]
    return tuple((sum(claim[i] for claim in lower), sum(claim[i] for claim in higher)) for i in places)


def worker_schedule(program: Program) -> tuple[str, ...]:
    """Text lines that must be equal on all workers, without numbers of gathered rows."""
    everyone = " ".join(map(str, program.workers.devices_per_worker))
    # the verifier checks that all devices have the same exchanges
    launches = calls_to(program.graphs()[0], *ops.BETWEEN_WORKERS)
    met = (meeting.line for meeting in worker_meetings(program))
    return (f"devices of workers: {everyone}", *met, *(_line(program, node) for node in launches))


def schedule_hash(program: Program) -> str:
    return hashlib.sha256("\n".join(worker_schedule(program)).encode()).hexdigest()


def _elements(bucket: Bucket, node: fx.Node) -> str:
    packs = [pack for pack in bucket.packs if pack.number == pack_of(node)]
    return "".join(f" pack {pack.number} at {pack.start} to {pack.stop}" for pack in packs)


def _line(program: Program, node: fx.Node) -> str:
    bucket = program.buckets[bucket_of(node)]
    slots = ", ".join(f"{s.variable}{list(s.shape)}{list(s.strides)} at {s.offset}" for s in bucket.slots)
    value = node.meta.get("val")
    dtype = value.value.dtype if isinstance(value, ops.Pending) else bucket.dtype
    sent = f" as {'; '.join(map(str, bucket.sent_factors))}" if bucket.is_sent_as_factors else ""
    op = f" {node.kwargs['op']}" if "op" in node.kwargs else ""
    op += f" of {node.kwargs['count']} largest" if "count" in node.kwargs else ""
    op += f" of {node.kwargs['payload']}, {node.kwargs['num_bytes']} bytes" if "payload" in node.kwargs else ""
    return (
        f"{name_of(node)}{op} bucket {bucket.index}{_elements(bucket, node)} {dtype} {bucket.num_elements} over "
        f"{node.kwargs.get('link')} for {bucket.rule.label}: {slots}{sent}"
    )
