"""The gradients of earlier calls, which the next update takes: their sums on each replica, and how many examples they are of."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.messages.wording import counted
from mirrorc.runtime.state.variables.layout import memory_for_gradients, slot_views


@dataclass(frozen=True)
class Examples:
    """How many examples a call has.

    Attributes:
        own: of this process.
        of_all: of all workers that make the call together, this one included.
        kept_elsewhere: of earlier calls whose gradients other workers keep.
        present_before: how many replicas of the workers before this one have examples.
        num_present: how many replicas of all workers have; 0 where this process asks no others, and its own count.
    """

    own: int
    of_all: int
    kept_elsewhere: int = 0
    present_before: int = 0
    num_present: int = 0


@dataclass(frozen=True)
class _Sums:
    """Sums of gradients, laid out as the buckets are.

    Attributes:
        plan: the buckets.
        flat: for each bucket, a sum for each replica, 1-D.
        aside: of variables that are in no bucket of the plan, a sum for each replica.
    """

    plan: tuple[Bucket, ...] = ()
    flat: Sequence[Sequence[torch.Tensor]] = ()
    aside: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)

    def of_variables(self) -> dict[str, Sequence[torch.Tensor]]:
        """The sums by variable, as views."""
        found = dict(self.aside)
        for bucket, own in zip(self.plan, self.flat, strict=True):
            views = [slot_views(flat, bucket) for flat in own]
            found |= {slot.variable: [view[i] for view in views] for i, slot in enumerate(bucket.slots)}
        return found


def _power_below(part: float) -> float:
    """The largest power of two that is not above a positive number: multiplying by one rounds nothing."""
    return math.ldexp(0.5, math.frexp(part)[1])


@dataclass(frozen=True)
class _Counts:
    """What the sums are of.

    Attributes:
        num_calls, num_examples: see `AccumulatedGradients`.
        unit: the weight of each example's loss in the sums, or of each call's if losses are sums.
        names: the variables that have gradients in them.
        used: those of which some call has used the parameter, so that its gradient is not absent.
    """

    num_calls: int = 0
    num_examples: int = 0
    unit: float = 1.0
    names: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()


class AccumulatedGradients:
    """Sums of gradients on each replica, over the calls since the last update.

    Sums are in the dtype of their parameters, as ``parameter.grad`` is. The losses of all calls have one weight for each example:
    that with which the first call's loss has the weight 1. A loss that is scaled has its part of the examples of the last update
    that took sums, rounded down to a power of two: float16 then overflows where it does in a loop that divides losses. The step
    that takes the sums makes up for either. Of several workers, each has sums and counts of its own examples; the step that takes
    them is told those of the others.

    Args:
        devices: the devices, in order of replicas.

    Attributes:
        share: what the running step multiplies the sums by.
        is_torn: whether a call has failed while it was added, so that the sums may be incomplete.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._sums, self._counts = _Sums(), _Counts()
        self._begun = _Counts()  # what the sums are of when the call is done that has begun last
        self._last_update = 0  # how many examples the last update had that took sums of mean losses
        self.share = 0.0
        self.is_torn = False

    @property
    def num_calls(self) -> int:
        """How many calls the sums are of; 0 if nothing is kept."""
        return self._counts.num_calls

    @property
    def num_examples(self) -> int:
        """How many examples these calls had together."""
        return self._counts.num_examples

    @property
    def names(self) -> frozenset[str]:
        """The variables of which gradients are kept."""
        return self._counts.names

    @property
    def used(self) -> frozenset[str]:
        """Those of them whose parameters some call has used; the gradients of others are zeros in place of none."""
        return self._counts.used

    def sums_of(self, bucket: int) -> Sequence[torch.Tensor]:
        """The sums of a bucket, for each replica."""
        return self._sums.flat[bucket]

    def check(self, program: Program) -> None:
        """Refuses a program that cannot go on with the sums.

        Raises:
            ExecutionError: the sums may be incomplete.
            ValueError: the program updates, but not all variables that have gradients in the sums.
        """
        if self.is_torn:
            raise ExecutionError(
                "a call of step.accumulate() has failed while its gradients were added, so those that are kept may be "
                "incomplete: drop them with step.zero_grad(), and go on"
            )
        if program.accumulates or not self.num_calls:
            return
        missing = sorted(self._counts.names - {slot.variable for bucket in program.buckets for slot in bucket.slots})
        if missing:
            raise ValueError(
                f"step.accumulate() has kept a gradient of {missing[0]!r}, which this step does not train (it was frozen since, "
                "or this batch does not reach it): let the accumulation end with a step that trains it, or drop what is kept "
                "with step.zero_grad()"
            )

    def fit(self, plan: tuple[Bucket, ...]) -> None:
        """Lays the sums out for a plan of buckets; those of variables that it does not have are kept aside.

        It is made aside and put in place at once, so that a failure changes nothing.
        """
        if self._sums.plan == plan:
            return
        old = {name: own for name, own in self._sums.of_variables().items() if name in self._counts.names}
        flat = [[memory_for_gradients(bucket, device.torch_device) for device in self._devices] for bucket in plan]
        for bucket, own in zip(plan, flat, strict=True) if self.num_calls else ():
            for replica, memory in enumerate(own):
                for slot, view in zip(bucket.slots, slot_views(memory, bucket), strict=True):
                    view.copy_(old[slot.variable][replica]) if slot.variable in old else view.zero_()
        planned = {slot.variable for bucket in plan for slot in bucket.slots}
        aside = {name: [view.clone() for view in own] for name, own in old.items() if name not in planned}
        self._sums = _Sums(plan, flat, aside)

    def release(self) -> None:
        """Frees the memory of sums, if nothing is kept in it."""
        if not self.num_calls:
            self._sums = _Sums()

    def begin_call(self, program: Program, examples: Examples, scale: float) -> float:
        """Begins a call that accumulates.

        Args:
            program: that it runs.
            examples: how many it has.
            scale: of its loss.

        Returns:
            What its loss is multiplied by before backward.
        """
        size, counts = examples.of_all if program.loss_reduction == "mean" else 1, self._counts
        part = _power_below(size / max(size, self._last_update)) if scale != 1.0 else 1.0
        unit = counts.unit if counts.num_calls else scale * part / size
        own = {slot.variable for bucket in program.buckets for slot in bucket.slots}
        num_calls, num_examples = counts.num_calls + 1, counts.num_examples + examples.own
        self._begun = _Counts(num_calls, num_examples, unit, counts.names | own, counts.used | own)
        return unit * size

    def begin_step(self, program: Program, examples: Examples, scale: float) -> float:
        """Begins a step that updates with its own gradients and those that are kept; arguments and result as of `begin_call`."""
        if not (self.num_calls or examples.kept_elsewhere):
            return scale
        own, together = examples.of_all, self.num_examples + examples.kept_elsewhere + examples.of_all
        if program.loss_reduction != "mean":
            own = together = 1
        self._last_update = together
        self.share = scale / (together * self._counts.unit)
        return scale * own / together

    def add(self, bucket: int, replica: int, packed: torch.Tensor) -> None:
        """Adds what a replica has packed to its sum; the first call is copied."""
        own = self._sums.flat[bucket][replica]
        own.add_(packed) if self.num_calls else own.copy_(packed)

    def add_to(self, bucket: int, replica: int, packed: torch.Tensor, elements: slice = slice(None)) -> None:
        """Adds a replica's sum to what it has packed in this step, which are these elements of the bucket; there is none if other
        workers alone keep gradients."""
        if self.num_calls:
            packed.add_(self._sums.flat[bucket][replica][elements], alpha=self.share)

    def note_unused(self, names: Set[str]) -> None:
        """Notes that the call that has begun last has not used these parameters. May be repeated."""
        self._begun = replace(self._begun, used=self._begun.used - (names - self._counts.used))

    def finish_call(self) -> None:
        """Counts the call that has begun last, which is added on all replicas. May be repeated."""
        self._counts = self._begun

    def clear(self) -> None:
        """Drops the sums, whose memory stays for the next ones. May be repeated."""
        self._counts, self.is_torn = _Counts(), False
        if self._sums.aside:
            self._sums = _Sums(self._sums.plan, self._sums.flat)

    def drop(self, names: Collection[str]) -> None:
        """Drops the sums of some variables."""
        if self._counts.names <= set(names):
            self.clear()
            return
        for name, own in self._sums.of_variables().items():
            for view in own if name in names else ():
                view.zero_()
        counts, dropped = self._counts, set(names)
        self._counts = replace(counts, names=counts.names - dropped, used=counts.used - dropped)

    def __str__(self) -> str:
        return f"gradients of {counted(self.num_calls, 'call')} kept, {counted(self.num_examples, 'example')}"
