"""What a worker has not sent of its gradients, of which it sends a part in each step: it is added to those of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program, Property
from mirrorc.runtime.state.variables.layout import memory_for_gradients, slot_views


@dataclass(frozen=True)
class _Unsent:
    """What was not sent, laid out as the buckets are.

    Attributes:
        plan: the buckets of which a part is sent.
        kept: for each of them, by its index, what the steps that have taken place have not sent, 1-D.
        new: for each of them, what it is when the step that runs has taken place.
        aside: what was not sent of variables that are in none of them.
        scale: of the losses whose gradients are kept.
        new_scale: of the loss of the step that runs; None if none does.
        state: what payloads have returned in the last step, by variable; all workers have the same.
        new_state: what it is when the step that runs has taken place. Sums that are in flight then are put into it.
    """

    plan: tuple[Bucket, ...] = ()
    kept: Mapping[int, torch.Tensor] = field(default_factory=dict)
    new: Mapping[int, torch.Tensor] = field(default_factory=dict)
    aside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0
    new_scale: float | None = None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    new_state: dict[str, torch.Tensor] = field(default_factory=dict)


class UnsentGradients:
    """What this worker has not sent of its sums of gradients; one for all of its devices, and all programs of a step.

    A step reads what is kept and writes what is not sent of it elsewhere, and the two change places when it has taken place. A
    step that fails, or leaves its update out, changes nothing.

    Args:
        device: where it lies: the worker's first.

    Attributes:
        num_loads: how often it was replaced by what `values` gave; all workers have the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_loads = 0
        self._unsent = _Unsent()
        self._program: Program | None = None  # for which it is laid out

    def fit(self, program: Program) -> None:
        """Lays it out for the buckets of which a program sends a part; that of other variables is kept aside.

        It is made aside and put in place at once, so that a failure changes nothing.
        """
        if self._is_for(program) or Property.COMPRESSED not in program.properties:
            return
        sent = {bucket_of(node) for graph in program.graphs() for node in calls_to(graph, *ops.EXCHANGES_OF_PARTS)}
        plan = tuple(program.buckets[index] for index in sorted(sent))
        if plan != self._unsent.plan:
            old = self._of_variables()
            kept, new = ({b.index: memory_for_gradients(b, self._device).zero_() for b in plan} for _ in range(2))
            for bucket in plan:
                for slot, view in zip(bucket.slots, slot_views(kept[bucket.index], bucket), strict=True):
                    if slot.variable in old:
                        view.copy_(old.pop(slot.variable))
            aside = {name: own.clone() for name, own in old.items()}
            self._unsent = _Unsent(plan, kept, new, aside, self._unsent.scale, state=self._unsent.state)
        self._program = program

    def _is_for(self, program: Program) -> bool:
        """Whether it is laid out for a program, which may have got other remarks since."""
        return self._program is not None and program.device_graphs is self._program.device_graphs

    def begin(self, program: Program, scale: float) -> None:
        """Called before a step of a program whose loss is multiplied by a scale."""
        unsent, is_sent = self._unsent, self._is_for(program)
        self._unsent = replace(unsent, new_scale=scale if is_sent else None, new_state=dict(unsent.state))

    def add(self, bucket: int, elements: slice, own: torch.Tensor) -> torch.Tensor:
        """Adds what is kept of these elements of a bucket to a replica's share of the sum; the result lies elsewhere."""
        unsent = self._unsent
        assert unsent.new_scale is not None, "the step has begun"
        kept = unsent.kept[bucket][elements]
        return torch.add(own, kept, alpha=unsent.new_scale / unsent.scale, out=unsent.new[bucket][elements])

    def new(self, bucket: int) -> torch.Tensor:
        """What `add` gives of a bucket, of all replicas; what is sent is to be made zero in it."""
        return self._unsent.new[bucket]

    @property
    def states(self) -> tuple[Mapping[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The state of payloads that the last step has left, and that of the step that runs, by variable."""
        return self._unsent.state, self._unsent.new_state

    def finish(self) -> None:
        """Called when a step has taken place: what it has not sent is what is kept. May be repeated."""
        unsent = self._unsent
        if unsent.new_scale is not None:
            self._unsent = replace(
                unsent,
                kept=unsent.new,
                new=unsent.kept,
                scale=unsent.new_scale,
                new_scale=None,
                state=unsent.new_state,
            )  # at once

    def values(self) -> dict[str, torch.Tensor]:
        """What is kept, by variable: copies, of gradients of losses that are not scaled."""
        return {name: own / self._unsent.scale for name, own in self._of_variables().items()}

    def state_values(self) -> dict[str, torch.Tensor]:
        """The state of payloads, by variable: copies."""
        return {name: value.clone() for name, value in self._unsent.state.items()}

    def load(self, values: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Replaces what is kept by what `values` gave, for variables of the same shapes and dtypes; others have nothing then.
        Likewise the state of payloads."""
        self._replace(values, state)
        self.num_loads += 1

    def _replace(self, values: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        aside = {name: own.to(self._device) for name, own in values.items()}
        self._unsent, self._program = _Unsent(aside=aside, state=dict(state)), None

    def forget(self) -> None:
        """Called on all workers when some have made a step and others not: they go on with nothing kept, from a checkpoint."""
        self._replace({}, {})

    def _of_variables(self) -> dict[str, torch.Tensor]:
        found = dict(self._unsent.aside)
        for bucket in self._unsent.plan:
            views = slot_views(self._unsent.kept[bucket.index], bucket)
            found |= {slot.variable: view for slot, view in zip(bucket.slots, views, strict=True)}
        return found
