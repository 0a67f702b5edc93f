"""The arguments of a replica's program in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.custom_ops.random import mix
from mirrorc.ir.program import ArgumentKind, Program
from mirrorc.runtime.devices.events import wait_event
from mirrorc.runtime.devices.host_copies import HostCopies
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples


def replica_arguments(
    program: Program,
    replica: int,
    copies: HostCopies,
    start: Sequence[Any],
    shard: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
    seed: int | None,
    numbers: Sequence[int | float] = (),
    sizes: Sequence[int | float] = (),
    examples: Examples | None = None,
) -> list[Any]:
    """The arguments of a replica, with the batch on its device; empty for a replica without examples."""
    for event in start:
        wait_event(event)
    values: list[Any] = []
    for argument in program.arguments if replica in program.present else ():
        if argument.kind is ArgumentKind.BATCH:
            values.append(copies.to_device(shard[argument.leaf]))  # type: ignore[index]
        elif argument.kind in (ArgumentKind.TANGENT, ArgumentKind.SAVED):
            assert isinstance(shard, list)
            value = shard[argument.leaf]  # type: ignore[index]
            values.append(copies.to_device(value) if argument.kind is ArgumentKind.TANGENT else value)
            shard[argument.leaf] = None  # type: ignore[index]  # the program frees it behind its last use
        elif argument.kind is ArgumentKind.SIZE:
            values.append(sizes[argument.leaf])  # type: ignore[index]
        elif argument.kind is ArgumentKind.LOSS_WEIGHT:
            assert weight is not None
            values.append(weight)
        elif argument.kind is ArgumentKind.NUMBER:
            number = numbers[argument.leaf]  # type: ignore[index]
            values.append(torch.tensor(number, dtype=torch.float64 if type(number) is float else torch.int64))
        elif argument.kind is ArgumentKind.REPLICA:
            before = examples.present_before if examples is not None else 0
            values.append(torch.tensor(before + program.present.index(replica), dtype=torch.int64))
        elif argument.kind is ArgumentKind.NUM_REPLICAS:
            of_all = examples.num_present if examples is not None else 0
            values.append(torch.tensor(of_all or len(program.present), dtype=torch.int64))
        else:
            assert seed is not None
            values.append(torch.tensor(mix(seed, program.local_replicas[replica]), dtype=torch.int64))
    return values
