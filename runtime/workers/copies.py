"""What tells the bits of what every worker has a copy of, by name, so that workers can compare them without sending them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mirrorc.ir.program import Program
from mirrorc.runtime.state.replica_check import checksums
from mirrorc.runtime.workers.header import digest


def updated_as_a_whole(program: Program) -> list[str]:
    """The parameters that optimizers update that are not element-wise; each worker runs these by itself."""
    return [slot.variable for bucket in program.buckets if not bucket.rule.elementwise for slot in bucket.slots]


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A checksum of each tensor, by name."""
    rows = checksums(list(tensors.values())).tolist() if tensors else []
    return {name: f"checksum {digest(str(row)):x}" for name, row in zip(tensors, rows, strict=True)}


def checksums_of_state(
    optimizers: Sequence[torch.optim.Optimizer], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """What tells the bits of the optimizers' state, by entry and parameter.

    Args:
        optimizers: the user's.
        named: the variables, with their names.
    """
    names = {id(tensor): name for name, tensor in named}
    entries = {
        f"{key} of {names.get(id(parameter), 'another parameter')}": value
        for optimizer in optimizers
        for parameter, own in optimizer.state.items()
        for key, value in own.items()
    }
    found = checksums_of({name: value for name, value in entries.items() if isinstance(value, torch.Tensor)})
    others = {name: repr(value) for name, value in entries.items() if not isinstance(value, torch.Tensor)}
    return dict(sorted((found | others).items()))
