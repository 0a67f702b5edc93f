"""Commits of steps that take place only if all losses and reduced gradients are finite."""

from __future__ import annotations

import cmath
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import BucketParts, Part, slots_in
from mirrorc.analysis.buckets.clipping import is_checked, truths_of
from mirrorc.errors import NonFiniteError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.messages.wording import counted
from mirrorc.runtime.execution.commit.commit_point import SKIPPED, TAKES_PLACE, CommitPoint
from mirrorc.runtime.execution.commit.part_visitors import SumVisitor, sum_of, sums_of_all
from mirrorc.runtime.state.shares.deferred_tables import DeferredTables
from mirrorc.runtime.workers.protocol.vote import Vote


@dataclass(frozen=True)
class Examined:
    """A value, and the sum of its elements on the value's device: if the sum is finite, all elements are.

    A sum takes one pass over the value and no memory. If it is not finite, it may have overflowed; then the elements are
    looked at.
    """

    value: torch.Tensor
    total: torch.Tensor


def examined(value: torch.Tensor) -> Examined:
    """Adds up a value; does not wait for a GPU."""
    return Examined(value, sum_of(value))


def sums_are_finite(given: Sequence[Examined | ExaminedShare], *, at_once: bool) -> bool:
    """Whether all sums are finite. A GPU is asked for all of them at once, because each question waits for it."""
    totals = [one.total for one in given if isinstance(one, Examined)]
    totals += sums_of_all([one.visitor for one in given if isinstance(one, ExaminedShare)])
    if at_once and totals:
        return bool(torch.stack([total.isfinite() for total in totals]).all().item())
    return all(cmath.isfinite(total.item()) for total in totals)


@dataclass(frozen=True)
class ExaminedShare:
    """A share that was added up in parts, if it has any, but for the tables that are deferred.

    Attributes:
        value: the share.
        visitor: has visited its parts.
        deferred: its tables; None if all of it is made.
    """

    value: torch.Tensor
    visitor: SumVisitor
    deferred: DeferredTables | None


@dataclass(frozen=True)
class Fault:
    """What is not finite on one replica.

    Attributes:
        variable: whose gradient it is; empty for the loss.
        replica: the replica that has found it.
        place: where the examined elements begin in their bucket: replicas may have looked at the same ones.
        num_elements: how many of the elements that the replica has are not finite.
        example: one of them, as text.
    """

    variable: str
    replica: int
    place: int
    num_elements: int
    example: str


@dataclass(frozen=True)
class _Range:
    """The elements of a value that belong to a variable's gradient, and their place in the bucket; of a loss, no variable."""

    variable: str
    place: int
    start: int
    stop: int


def _faults(ranges: Sequence[_Range], value: torch.Tensor, replica: int) -> Iterator[Fault]:
    flat = value.reshape(-1)
    for own in ranges:
        elements = flat[own.start : own.stop]
        bad = elements[~elements.isfinite()]
        if bad.numel():
            yield Fault(own.variable, replica, own.place, bad.numel(), str(bad[0].item()))


class CheckedCommit(CommitPoint):
    """Lets a step take place if no replica has found anything that is not finite.

    What a replica has found lies there before it arrives, so that each replica, once all have arrived, knows of all and decides
    alike.

    Args:
        program: a LOWERED program whose commits take truth values.
        timeout_seconds: the longest time that a replica waits for the others.
    """

    def __init__(self, program: Program, timeout_seconds: float) -> None:
        super().__init__(program.devices, timeout_seconds)
        self._program = program
        self._ranges: list[list[list[_Range]]] = []  # for each replica, for each operand of its commit
        self._num_truths: list[int] = []
        self._skips = False
        self._found: dict[int, list[Fault]] = {}  # by replica
        buckets = () if program.accumulates else (bucket for bucket in program.buckets if bucket.part is None)
        self._known_to_all = {
            slot.variable for bucket in buckets for slot in bucket.slots
        }  # whose sums each worker has
        parts = BucketParts(program)
        for module in program.device_graphs.values():
            (commit,) = calls_to(module.graph, ops.commit)
            self._skips = commit.kwargs["otherwise"] == "skip"
            values = [flag.all_input_nodes[0] for flag in truths_of(commit)]
            self._num_truths.append(len(values))
            self._ranges.append([list(_ranges(program, value, parts.of(value))) for value in values])

    def begin(self) -> None:
        """See `CommitPoint`."""
        super().begin()
        self._found = {}

    def arrive_with(self, replica: int, *found: Any) -> None:
        """As `arrive`, with what the replica has examined before the numbers."""
        given, numbers = found[: self._num_truths[replica]], found[self._num_truths[replica] :]
        shares = [one.deferred for one in given if isinstance(one, ExaminedShare) and one.deferred is not None]
        DeferredTables.settle(shares)
        if not sums_are_finite(given, at_once=self._devices[replica].is_asynchronous):
            for share in shares:  # elements are looked at, and what is not made yet is of an earlier step
                share.make()
            pairs = zip(self._ranges[replica], given, strict=True)
            faults = [fault for ranges, one in pairs for fault in _faults(ranges, one.value, replica)]
            if faults:
                self._found[replica] = faults
        self.arrive(replica, *numbers)

    def leave_if_finite(self, replica: int) -> torch.Tensor | Literal[False] | None:
        """As `leave`; returns False if the step is skipped.

        Raises:
            NonFiniteError: something is not finite, and the program says that the step raises an error then.
        """
        self._rendezvous.await_replicas(replica, self._all)
        if self._found and self.agree is None and not self._skips:
            gradients = self._said_of_gradients(self._faults_of_gradients())
            raise NonFiniteError(_with_remedy([*self._said_of_losses(), *gradients]))
        met = self._met(replica)
        self._decide(SKIPPED if self._found else TAKES_PLACE, met)
        return False if self.is_skipped else self._told_to_all(met)

    def _vote(self, decision: str, numbers: torch.Tensor | None) -> Vote:
        """Sums that each worker has are the same on all; losses, parts of sums and what is accumulated are a worker's own."""
        has_sound_sums = not any(fault.variable in self._known_to_all for fault in self._all_faults())
        return Vote(decision is TAKES_PLACE, has_sound_sums, numbers)

    def _refuse(self) -> None:
        """Raises one error on all workers, unless all skip: about the losses of each, and the gradients that all have."""
        if self._skips:
            return
        assert self.hear is not None, "there are other workers"
        losses: list[str] = []
        gradients: list[str] = []
        sums: list[Fault] = []
        own = [astuple(fault) for fault in self._faults_of_gradients()]
        for name, text in self.hear(json.dumps([list(self._said_of_losses()), own])):
            of_losses, of_gradients = json.loads(text)
            losses += [f"{name}: {said}" for said in of_losses]
            faults = [Fault(*fault) for fault in of_gradients]
            if self._program.accumulates:
                gradients += [f"{name}: {said}" for said in self._said_of_gradients(faults)]
            else:
                sums += faults
        raise NonFiniteError(_with_remedy([*losses, *gradients, *self._said_of_gradients(sums)]))

    def _all_faults(self) -> list[Fault]:
        return [fault for replica in sorted(self._found) for fault in self._found[replica]]

    def _faults_of_gradients(self) -> list[Fault]:
        return [fault for fault in self._all_faults() if fault.variable]

    def _said_of_losses(self) -> Iterator[str]:
        """Says what all replicas have found in losses."""
        for fault in self._all_faults():
            if not fault.variable:
                yield f"the loss on {self._program.devices[fault.replica]} is {fault.example}"

    def _said_of_gradients(self, found: Sequence[Fault]) -> Iterator[str]:
        """Says what replicas, maybe of several workers, have found in gradients; where some have the same elements, these count
        once."""
        names = {fault.variable for fault in found}
        first = next((name for name in self._program.variables if name in names), None)
        if first is not None:
            own = [fault for fault in found if fault.variable == first]
            shape = self._program.variables[first].shape
            number, total = sum({fault.place: fault.num_elements for fault in own}.values()), math.prod(shape)
            others = len(names - {first})
            more = f", and so is that of {counted(others, 'other variable')}" if others else ""
            yield (
                f"the reduced gradient of {first!r} is not finite ({number} of {counted(total, 'element')}, such as "
                f"{own[0].example}){more}"
            )


def _with_remedy(said: Sequence[str]) -> str:
    return (
        f"{'; '.join(said)}. Look at this batch and at the learning rate; check_finite='skip' leaves the update of such a "
        "step out and goes on"
    )


def _ranges(program: Program, value: fx.Node, part: Part | None) -> Iterator[_Range]:
    """The variables whose gradients lie in a value."""
    if part is None:
        yield _Range("", 0, 0, value.meta["val"].numel())
        return
    for variable, place, start, stop in slots_in(program, part):
        yield _Range(variable, place, start, stop)


def commit_point_of(program: Program, timeout_seconds: float) -> CommitPoint:
    """Where the replicas of a LOWERED program decide on a step: a `CheckedCommit` if its commits take truth values."""
    graphs = [module.graph for module in program.device_graphs.values()]
    checks = any(is_checked(commit) for graph in graphs for commit in calls_to(graph, ops.commit))
    return CheckedCommit(program, timeout_seconds) if checks else CommitPoint(program.devices, timeout_seconds)
