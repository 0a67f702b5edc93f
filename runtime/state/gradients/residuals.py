"""Residuals of gradient compression (error feedback)."""

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
    """Residuals by bucket, in the bucket's layout. The ``new`` fields belong to the running step.

    Attributes:
        aside: residuals of variables without a bucket.
        new_scale: the running step's loss scale; None between steps.
        state: payloads' states by variable; equal on all workers. New ones may be in flight.
    """

    plan: tuple[Bucket, ...] = ()
    residuals: Mapping[int, torch.Tensor] = field(default_factory=dict)
    new: Mapping[int, torch.Tensor] = field(default_factory=dict)
    aside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0
    new_scale: float | None = None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    new_state: dict[str, torch.Tensor] = field(default_factory=dict)


class UnsentGradients:
    """Error feedback of this worker, for all of its devices and all programs of a step.

    A step reads the old residuals and writes new ones to separate memory; `finish` swaps the two.

    Attributes:
        num_loads: the number of calls of `load`; equal on all workers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_loads = 0
        self._unsent = _Unsent()
        self._program: Program | None = None  # of the present layout

    def fit(self, program: Program) -> None:
        if self._is_for(program) or Property.COMPRESSED not in program.properties:
            return
        sent = {bucket_of(node) for graph in program.graphs() for node in calls_to(graph, *ops.EXCHANGES_OF_PARTS)}
        plan = tuple(program.buckets[index] for index in sorted(sent))
        if plan != self._unsent.plan:
            old = self._of_variables()
            residuals, new = ({b.index: memory_for_gradients(b, self._device).zero_() for b in plan} for _ in range(2))
            for bucket in plan:
                for slot, view in zip(bucket.slots, slot_views(residuals[bucket.index], bucket), strict=True):
                    if slot.variable in old:
                        view.copy_(old.pop(slot.variable))
            aside = {name: tensor.clone() for name, tensor in old.items()}
            self._unsent = _Unsent(plan, residuals, new, aside, self._unsent.scale, state=self._unsent.state)
        self._program = program

    def _is_for(self, program: Program) -> bool:
        """Compares device graphs, because a program's remarks may be replaced."""
        return self._program is not None and program.device_graphs is self._program.device_graphs

    def begin(self, program: Program, scale: float) -> None:
        unsent, is_sent = self._unsent, self._is_for(program)
        self._unsent = replace(unsent, new_scale=scale if is_sent else None, new_state=dict(unsent.state))

    def add(self, bucket: int, elements: slice, share: torch.Tensor) -> torch.Tensor:
        """The share plus the residual of these elements, at the step's loss scale; in the memory of `new`."""
        unsent = self._unsent
        assert unsent.new_scale is not None, "the step has begun"
        residual = unsent.residuals[bucket][elements]
        return torch.add(share, residual, alpha=unsent.new_scale / unsent.scale, out=unsent.new[bucket][elements])

    def new(self, bucket: int) -> torch.Tensor:
        """The memory of `add`'s results for a bucket. The caller zeroes the sent elements."""
        return self._unsent.new[bucket]

    @property
    def states(self) -> tuple[Mapping[str, torch.Tensor], dict[str, torch.Tensor]]:
        return self._unsent.state, self._unsent.new_state

    def finish(self) -> None:
        unsent = self._unsent
        if unsent.new_scale is not None:
            scale, state = unsent.new_scale, unsent.new_state
            sent = replace(unsent, residuals=unsent.new, new=unsent.residuals, scale=scale, new_scale=None, state=state)
            self._unsent = sent  # at once

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor / self._unsent.scale for name, tensor in self._of_variables().items()}

    def state_values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._unsent.state.items()}

    def load(self, values: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        self._replace(values, state)
        self.num_loads += 1

    def _replace(self, values: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        aside = {name: tensor.to(self._device) for name, tensor in values.items()}
        self._unsent, self._program = _Unsent(aside=aside, state=dict(state)), None

    def forget(self) -> None:
        """Drops all residuals, on all workers, after a step that only some workers completed."""
        self._replace({}, {})

    def _of_variables(self) -> dict[str, torch.Tensor]:
        tensors = dict(self._unsent.aside)
        for bucket in self._unsent.plan:
            views = slot_views(self._unsent.residuals[bucket.index], bucket)
            tensors |= {slot.variable: view for slot, view in zip(bucket.slots, views, strict=True)}
        return tensors
