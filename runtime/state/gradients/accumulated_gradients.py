"""Gradient accumulation over calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.runtime.state.variables.layout import memory_for_gradients, slot_views


@dataclass(frozen=True)
class Examples:
    """Numbers of examples of a call, on this worker and on all.

    Attributes:
        calls_elsewhere: examples accumulated by other workers.
        present_before: replicas with examples on workers of lower rank.
        num_present: replicas with examples on all workers; 0 without other workers.
    """

    local: int
    of_all: int
    calls_elsewhere: int = 0
    present_before: int = 0
    num_present: int = 0


@dataclass(frozen=True)
class _Sums:
    plan: tuple[Bucket, ...] = ()
    flat: Sequence[Sequence[torch.Tensor]] = ()
    aside: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)

    def of_variables(self) -> dict[str, Sequence[torch.Tensor]]:
        sums = dict(self.aside)
        for bucket, memories in zip(self.plan, self.flat, strict=True):
            views = [slot_views(flat, bucket) for flat in memories]
            sums |= {slot.variable: [view[i] for view in views] for i, slot in enumerate(bucket.slots)}
        return sums


@dataclass(frozen=True)
class _Counts:
    """Calls and used variables. ``unit``: the weight of each example's loss, or of each call's if losses are sums."""

    num_calls: int = 0
    num_examples: int = 0
    unit: float = 1.0
    names: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()


class AccumulatedGradients:
    """Gradients that each replica has summed since the last update, in the dtype of their parameters.

    All examples have the same weight. The first call's loss has weight 1; the updating step corrects this. With loss
    scaling, its weight is the scale times the call's fraction of the last update's examples, rounded down to a power of
    two, so that float16 gradients overflow as in a loop that divides losses.

    Attributes:
        share: the factor of the sums in the running step.
        is_torn: an addition has failed, so sums may be incomplete.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._sums, self._counts = _Sums(), _Counts()
        self._begun = _Counts()  # the counts after the call in progress
        self._last_update = 0  # examples of the last update with sums of mean losses
        self.share = 0.0
        self.is_torn = False

    @property
    def num_calls(self) -> int:
        return self._counts.num_calls

    @property
    def num_examples(self) -> int:
        return self._counts.num_examples

    @property
    def names(self) -> frozenset[str]:
        return self._counts.names

    @property
    def used(self) -> frozenset[str]:
        """Variables used in any call; the sums of others are zeros instead of None."""
        return self._counts.used

    def check(self, program: Program) -> None:
        if self.is_torn:
            raise problem(
                ExecutionError,
                "MC5002: a call of step.accumulate() has failed while its gradients were added",
                "those that are kept may be incomplete",
                "step.zero_grad(), and go on",
            )
        if program.accumulates or not self.num_calls:
            return
        missing = sorted(self._counts.names - {slot.variable for bucket in program.buckets for slot in bucket.slots})
        if missing:
            raise problem(
                ValueError,
                f"MC3206: step.accumulate() has kept a gradient of {missing[0]!r}, which this step does not train",
                "it was frozen since, or this batch does not reach it",
                ("train it in the call that ends the accumulation", "step.zero_grad(), to drop what is kept"),
            )

    def fit(self, plan: tuple[Bucket, ...]) -> None:
        """Allocates the sums for a bucket plan. A failure changes nothing."""
        if self._sums.plan == plan:
            return
        old = {name: sums for name, sums in self._sums.of_variables().items() if name in self._counts.names}
        flat = [[memory_for_gradients(bucket, device.torch_device) for device in self._devices] for bucket in plan]
        for bucket, sums in zip(plan, flat, strict=True) if self.num_calls else ():
            for replica, memory in enumerate(sums):
                for slot, view in zip(bucket.slots, slot_views(memory, bucket), strict=True):
                    view.copy_(old[slot.variable][replica]) if slot.variable in old else view.zero_()
        planned = {slot.variable for bucket in plan for slot in bucket.slots}
        aside = {name: [view.clone() for view in sums] for name, sums in old.items() if name not in planned}
        self._sums = _Sums(plan, flat, aside)

    def release(self) -> None:
        if not self.num_calls:
            self._sums = _Sums()

    def begin_call(self, program: Program, examples: Examples, scale: float) -> float:
        """Begins an accumulating call; returns the factor of its loss."""
        size, counts = examples.of_all if program.loss_reduction == "mean" else 1, self._counts
        exponent = math.frexp(size / max(size, self._last_update))[1]
        part = math.ldexp(0.5, exponent) if scale != 1.0 else 1.0  # multiplication by a power of two is exact
        unit = counts.unit if counts.num_calls else scale * part / size
        trained = {slot.variable for bucket in program.buckets for slot in bucket.slots}
        num_calls, num_examples = counts.num_calls + 1, counts.num_examples + examples.local
        self._begun = _Counts(num_calls, num_examples, unit, counts.names | trained, counts.used | trained)
        return unit * size

    def begin_step(self, program: Program, examples: Examples, scale: float) -> float:
        if not (self.num_calls or examples.calls_elsewhere):
            return scale
        local, together = examples.of_all, self.num_examples + examples.calls_elsewhere + examples.of_all
        if program.loss_reduction != "mean":
            local = together = 1
        self._last_update = together
        self.share = scale / (together * self._counts.unit)
        return scale * local / together

    def add(self, bucket: int, replica: int, packed: torch.Tensor) -> None:
        total = self._sums.flat[bucket][replica]
        total.add_(packed) if self.num_calls else total.copy_(packed)

    def add_to(self, bucket: int, replica: int, packed: torch.Tensor, elements: slice = slice(None)) -> None:
        if self.num_calls:
            packed.add_(self._sums.flat[bucket][replica][elements], alpha=self.share)

    def note_unused(self, names: Set[str]) -> None:
        self._begun = replace(self._begun, used=self._begun.used - (names - self._counts.used))

    def finish_call(self) -> None:
        self._counts = self._begun

    def mark_torn(self) -> None:
        self.is_torn = True

    def clear(self) -> None:
        """Drops the sums, but keeps their memory; idempotent."""
        self._counts, self.is_torn = _Counts(), False
        if self._sums.aside:
            self._sums = _Sums(self._sums.plan, self._sums.flat)

    def drop(self, names: Collection[str]) -> None:
        if self._counts.names <= set(names):
            self.clear()
            return
        for name, sums in self._sums.of_variables().items():
            for view in sums if name in names else ():
                view.zero_()
        counts, dropped = self._counts, set(names)
        self._counts = replace(counts, names=counts.names - dropped, used=counts.used - dropped)

    def __str__(self) -> str:
        return f"gradients of {counted(self.num_calls, 'call')} kept, {counted(self.num_examples, 'example')}"
