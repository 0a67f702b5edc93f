"""Makes results of a call the same on all workers."""

from __future__ import annotations

import torch

from mirrorc.coordination.fingerprint import written_buffers
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Variable
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.runtime.workers.team.control_messages import ControlCollectives


def total_loss(control: ControlCollectives, local: torch.Tensor | None) -> torch.Tensor:
    """The sum over workers, a float64 scalar on the CPU. ``local`` is None without examples."""
    total = torch.zeros((), dtype=torch.float64)
    if local is not None:
        total.copy_(local.detach())
    control.all_reduce(total)
    return total


def show_buffers(
    control: ControlCollectives, program: Program, state: StepState, agreed: Agreement, num_present: int
) -> None:
    """Gives written buffers equal values on all workers: the mean, or the values of the first worker with examples."""
    kinds: dict[tuple[Aggregation, torch.dtype], list[Variable]] = {}
    for variable in written_buffers(program):
        kinds.setdefault((variable.aggregation, variable.dtype), []).append(variable)
    values: dict[str, torch.Tensor] = {}
    for (aggregation, _), variables in kinds.items():
        buffers = [state.store.tensors[variable.name].detach() for variable in variables]
        flat = torch.cat([value.reshape(-1) for value in buffers])
        if aggregation is Aggregation.MEAN:
            control.all_reduce(flat.mul_(num_present) if num_present else flat.zero_())
            flat.div_(agreed.num_present)
        else:
            control.broadcast(flat, agreed.first_present)
        parts = flat.split([value.numel() for value in buffers])
        values |= {v.name: part.view_as(value) for v, value, part in zip(variables, buffers, parts, strict=True)}
    if values:
        state.store.show(values)
