"""Commits that need finite losses and finite gradients."""

from __future__ import annotations

import cmath
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import BucketParts, Part, slots_in
from mirrorc.analysis.buckets.rescaling import is_checked, truths_of
from mirrorc.errors import NonFiniteError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.messages.problem import message
from mirrorc.messages.wording import counted
from mirrorc.runtime.execution.commit.commit_point import SKIPPED, TAKES_PLACE, CommitPoint, OtherWorkers
from mirrorc.runtime.execution.commit.part_visitors import SumVisitor, sum_of, sums_of_all
from mirrorc.runtime.state.shares.deferred_tables import DeferredTables
from mirrorc.runtime.workers.protocol.vote import Vote


@dataclass(frozen=True)
class Examined:
    """A value and the sum of its elements. A finite sum proves finite elements; an infinite sum may be an overflow."""

    value: torch.Tensor
    total: torch.Tensor


def examined(value: torch.Tensor) -> Examined:
    """Does not synchronize with a GPU."""
    return Examined(value, sum_of(value))


def sums_are_finite(values: Sequence[Examined | ExaminedShare], *, at_once: bool) -> bool:
    """``at_once`` synchronizes with a GPU only once."""
    totals = [value.total for value in values if isinstance(value, Examined)]
    totals += sums_of_all([value.visitor for value in values if isinstance(value, ExaminedShare)])
    if at_once and totals:
        return bool(torch.stack([total.isfinite() for total in totals]).all().item())
    return all(cmath.isfinite(total.item()) for total in totals)


@dataclass(frozen=True)
class ExaminedShare:
    """A share whose parts are summed by a visitor, except for ``deferred`` tables."""

    value: torch.Tensor
    visitor: SumVisitor
    deferred: DeferredTables | None


@dataclass(frozen=True)
class Fault:
    """Non-finite elements on a replica.

    Attributes:
        variable: the gradient's variable; empty for the loss.
        place: offset in the bucket; equal if several replicas checked the same elements.
    """

    variable: str
    replica: int
    place: int
    num_elements: int
    example: str


_Range = tuple[str, int, int, int]
"""Elements of a checked value: variable (empty for a loss), place as in `Fault`, start and stop."""


def _faults(ranges: Sequence[_Range], value: torch.Tensor, replica: int) -> Iterator[Fault]:
    flat = value.reshape(-1)
    for variable, place, start, stop in ranges:
        elements = flat[start:stop]
        bad = elements[~elements.isfinite()]
        if bad.numel():
            yield Fault(variable, replica, place, bad.numel(), str(bad[0].item()))


class CheckedCommit(CommitPoint):
    """Commits a step if no replica has found a non-finite value.

    Replicas record their faults before the barrier. After it, each knows all faults, so all decide equally.
    """

    def __init__(
        self, program: Program, timeout_seconds: float, settle: Callable[[], None], workers: OtherWorkers | None
    ) -> None:
        super().__init__(program.devices, timeout_seconds, settle, workers)
        self._program = program
        self._ranges: list[list[list[_Range]]] = []  # for each replica, for each operand of its commit
        self._num_truths: list[int] = []
        self._skips = False
        self._faults_by_replica: dict[int, list[Fault]] = {}
        buckets = () if program.accumulates else (bucket for bucket in program.buckets if bucket.part is None)
        # gradients whose sums each worker has
        self._known_to_all = {slot.variable for bucket in buckets for slot in bucket.slots}
        parts = BucketParts(program)
        for module in program.device_graphs.values():
            (commit,) = calls_to(module.graph, ops.commit)
            self._skips = commit.kwargs["otherwise"] == "skip"
            values = [flag.all_input_nodes[0] for flag in truths_of(commit)]
            self._num_truths.append(len(values))
            self._ranges.append([_ranges(program, value, parts.of(value)) for value in values])

    def begin(self) -> None:
        super().begin()
        self._faults_by_replica = {}

    def arrive_with(self, replica: int, *values: Any) -> None:
        checks, numbers = values[: self._num_truths[replica]], values[self._num_truths[replica] :]
        shares = [check.deferred for check in checks if isinstance(check, ExaminedShare) and check.deferred is not None]
        DeferredTables.settle(shares)
        if not sums_are_finite(checks, at_once=self._devices[replica].is_asynchronous):
            for share in shares:  # elements are read, and shares that are not made yet have those of an earlier step
                share.make()
            pairs = zip(self._ranges[replica], checks, strict=True)
            faults = [fault for ranges, check in pairs for fault in _faults(ranges, check.value, replica)]
            if faults:
                self._faults_by_replica[replica] = faults
        self.arrive(replica, *numbers)

    def commit_if_finite(self, replica: int) -> torch.Tensor | Literal[False] | None:
        self._rendezvous.await_replicas(replica, self._all)
        if self._faults_by_replica and self._workers is None and not self._skips:
            gradients = self._gradient_messages(self._faults_of_gradients())
            raise NonFiniteError(_text([*self._loss_messages(), *gradients]))
        met = self._met(replica)
        self._decide(SKIPPED if self._faults_by_replica else TAKES_PLACE, met)
        return False if self.is_skipped else self._numbers_for_all(met)

    def _make_vote(self, decision: str, numbers: torch.Tensor | None) -> Vote:
        """Reports only sums over workers. Losses, parts of sums and accumulated gradients are local."""
        has_sound_sums = not any(fault.variable in self._known_to_all for fault in self._all_faults())
        return Vote(decision is TAKES_PLACE, has_sound_sums, numbers)

    def _refuse(self) -> None:
        if self._skips:
            return
        assert self._workers is not None, "alone, a fault raises before the decision"
        losses: list[str] = []
        gradients: list[str] = []
        sums: list[Fault] = []
        local_faults = [astuple(fault) for fault in self._faults_of_gradients()]
        for name, text in self._workers.exchange_texts(json.dumps([list(self._loss_messages()), local_faults])):
            of_losses, of_gradients = json.loads(text)
            losses += [f"{name}: {message}" for message in of_losses]
            faults = [Fault(*fault) for fault in of_gradients]
            if self._program.accumulates:
                gradients += [f"{name}: {message}" for message in self._gradient_messages(faults)]
            else:
                sums += faults
        raise NonFiniteError(_text([*losses, *gradients, *self._gradient_messages(sums)]))

    def _all_faults(self) -> list[Fault]:
        return [fault for replica in sorted(self._faults_by_replica) for fault in self._faults_by_replica[replica]]

    def _faults_of_gradients(self) -> list[Fault]:
        return [fault for fault in self._all_faults() if fault.variable]

    def _loss_messages(self) -> Iterator[str]:
        for fault in self._all_faults():
            if not fault.variable:
                yield f"the loss on {self._program.devices[fault.replica]} is {fault.example}"

    def _gradient_messages(self, faults: Sequence[Fault]) -> Iterator[str]:
        names = {fault.variable for fault in faults}
        first = next((name for name in self._program.variables if name in names), None)
        if first is not None:
            variable_faults = [fault for fault in faults if fault.variable == first]
            shape = self._program.variables[first].shape
            number, total = (
                sum({fault.place: fault.num_elements for fault in variable_faults}.values()),
                math.prod(shape),
            )
            others = len(names - {first})
            more = f", and so is that of {counted(others, 'other variable')}" if others else ""
            yield (
                f"the reduced gradient of {first!r} is not finite ({number} of {counted(total, 'element')}, such as "
                f"{variable_faults[0].example}){more}"
            )


def _text(messages: Sequence[str]) -> str:
    return message(
        f"MC5101: {messages[0]}",
        "; ".join(messages[1:]),
        (
            "x.isfinite().all() of this batch; if it is, a smaller learning rate",
            "check_finite='skip', which skips such updates",
        ),
    )


def _ranges(program: Program, value: fx.Node, part: Part | None) -> list[_Range]:
    return [("", 0, 0, value.meta["val"].numel())] if part is None else list(slots_in(program, part))


def commit_point_of(
    program: Program, timeout_seconds: float, settle: Callable[[], None], workers: OtherWorkers | None
) -> CommitPoint:
    graphs = [module.graph for module in program.device_graphs.values()]
    if any(is_checked(commit) for graph in graphs for commit in calls_to(graph, ops.commit)):
        return CheckedCommit(program, timeout_seconds, settle, workers)
    return CommitPoint(program.devices, timeout_seconds, settle, workers)
