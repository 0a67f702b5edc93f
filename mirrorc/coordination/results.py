"""What a step over several workers gives on each of them: the loss of all their examples, and buffers that are the same."""

from __future__ import annotations

import torch

from mirrorc.coordination.fingerprint import written_buffers
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Variable
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.runtime.workers.team.control_messages import Words


def total_loss(words: Words, own: torch.Tensor | None) -> torch.Tensor:
    """The weighted sum of the losses of all workers, a scalar, float64 in host memory.

    Args:
        words: of the workers.
        own: the sum of this worker's losses, a scalar; None if it has no examples.

    Raises:
        LostConnectionError: a worker has failed, or the connection broke.
    """
    total = torch.zeros((), dtype=torch.float64)
    if own is not None:
        total.copy_(own.detach())
    words.sum(total)
    return total


def show_buffers(words: Words, program: Program, state: StepState, agreed: Agreement, num_present: int) -> None:
    """Gives all replicas of all workers what they have of their own as one; all workers send it in one order.

    Args:
        words: of the workers.
        program: whose steps write the buffers.
        state: of the step.
        agreed: what the workers have agreed about the step.
        num_present: how many replicas of this worker have examples in it.

    Raises:
        LostConnectionError: a worker has failed, or the connection broke.
    """
    kinds: dict[tuple[Aggregation, torch.dtype], list[Variable]] = {}
    for variable in written_buffers(program):
        kinds.setdefault((variable.aggregation, variable.dtype), []).append(variable)
    values: dict[str, torch.Tensor] = {}
    for (aggregation, _), variables in kinds.items():
        own = [state.store.tensors[variable.name].detach() for variable in variables]
        flat = torch.cat([value.reshape(-1) for value in own])
        if aggregation is Aggregation.MEAN:
            words.sum(flat.mul_(num_present) if num_present else flat.zero_())
            flat.div_(agreed.num_present)
        else:
            words.copy(flat, agreed.first_present)
        parts = flat.split([value.numel() for value in own])
        values |= {v.name: part.view_as(value) for v, value, part in zip(variables, own, parts, strict=True)}
    if values:
        state.store.show(values)
