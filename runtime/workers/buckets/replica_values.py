"""Collectives that the model calls, over the replicas of all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mirrorc.analysis.communication.worker_meetings import rows_of_meeting, worker_meetings
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.runtime.communication.replica_values import number_of
from mirrorc.runtime.workers.buckets.joint_launches import JointLaunches, Launch

_ROWS = (ops.rows_of_replicas, ops.own_rows_of_sum)
_GATHERED = ops.rows_of_replicas.__name__
_SENT_AS = {torch.int16: torch.int64}  # what gloo cannot add; the sum wraps around alike


class WorkerValues:
    """Exchanges values with other workers' replicas during forward and backward.

    The last present replica launches the sum over all workers. A gather is a sum of integers, in which each worker has
    its rows and zeros elsewhere. Every replica waits for all others, so all workers launch the sums in program order.
    """

    def __init__(self, program: Program, timeout_seconds: float, launch: Launch) -> None:
        self._meetings = {meeting.number: meeting for meeting in worker_meetings(program)}
        self._present = tuple(program.present) or (0,)  # the first device attends for a worker without examples
        self._joint = JointLaunches(len(self._present), self._meetings, launch, timeout_seconds)
        self.reset()

    def begin_afresh(self) -> None:
        self._joint.begin_afresh()
        self.reset()

    def abort(self) -> None:
        self._joint.abort()

    def reset(self) -> None:
        self._left: dict[int, dict[int, torch.Tensor]] = {number: {} for number in self._meetings}
        self._sums: dict[int, torch.Tensor] = {}
        self._rows: dict[int, dict[int, int]] = {number: {} for number in self._meetings}

    def arrive(self, node: fx.Node, replica: int, value: torch.Tensor | None = None) -> None:
        number = number_of(node)
        copy = value.clone(memory_format=torch.contiguous_format) if value is not None else None
        with self._joint.lock:
            if copy is not None:
                self._left[number][replica] = copy
                self._rows[number][replica] = rows_of_meeting(node) if node.target in _ROWS else 0
            if self._joint.is_last(number):
                message = self._sums[number] = self._message(number)
                self._joint.send(number, (lambda group: group.all_reduce(message)) if message.numel() else None)

    def leave(self, node: fx.Node, replica: int) -> torch.Tensor | None:
        """The result over the present replicas of all workers: contiguous, and not shared."""
        number = number_of(node)
        meeting = self._meetings[number]
        self._joint.wait(number, self._present.index(replica), f"the model's {meeting.name} {number}")
        if node.target is ops.attend:
            return None
        whole = self._sums[number]
        whole = whole.view(meeting.dtype) if node.target is ops.rows_of_replicas else whole.to(meeting.dtype)
        whole = whole.view(meeting.shape)
        if node.target is ops.own_rows_of_sum:
            rows = self._rows[number]
            start = meeting.before + sum(rows[present] for present in self._present[: self._present.index(replica)])
            whole = whole.narrow(0, start, rows[replica])
        return whole.clone(memory_format=torch.contiguous_format)

    def _message(self, number: int) -> torch.Tensor:
        meeting, left = self._meetings[number], self._left.pop(number)
        values = [left[replica] for replica in self._present if replica in left]
        if meeting.name == _GATHERED:
            whole = torch.zeros(meeting.shape, dtype=meeting.dtype)
            if values:
                local = torch.cat(values)
                whole.narrow(0, meeting.before, len(local)).copy_(local)
            return _as_integers(whole.view(-1))
        if not values:
            return torch.zeros(meeting.shape, dtype=_SENT_AS.get(meeting.dtype, meeting.dtype)).view(-1)
        total = _sum(values)
        return total.to(_SENT_AS.get(meeting.dtype, meeting.dtype)).view(-1)


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = values
    for value in others:
        first += value
    return first


def _as_integers(flat: torch.Tensor) -> torch.Tensor:
    num_bytes = flat.numel() * flat.element_size()
    kinds = (torch.int64, torch.int32, torch.uint8)
    return flat.view(next(kind for kind in kinds if num_bytes % kind.itemsize == 0))
