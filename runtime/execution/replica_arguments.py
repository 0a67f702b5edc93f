"""The arguments of a replica's program in one step, and copies of batches to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.custom_ops.random import mix
from mirrorc.ir.program import ArgumentKind, Program
from mirrorc.runtime.devices.events import copied_to, record_event, reserve_for, wait_event
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples


class HostCopies:
    """Copies a replica's batches to its device, in the replica's thread.

    GPU copies have their own stream, so that the caller can queue a step while the previous one runs. A pinned batch
    may be overwritten after the step has returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._stream: Any = None  # made when first needed, while the GPU is the current one
        self._read: Any = None  # the event after which the host's memory has been read

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_gpu:
            return tensor.to(self._device)
        if tensor.device.type != "cpu":
            return copied_to(tensor, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = copied_to(tensor, self._device)
            self._read = record_event(self._device)
        wait_event(self._read, self._device)
        reserve_for(copy, current)
        return copy

    def wait_until_read(self) -> None:
        if self._read is not None:
            self._read.synchronize()
            self._read = None


def replica_arguments(
    program: Program,
    replica: int,
    copies: HostCopies,
    start: Sequence[Any],
    shard: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
    seed: int | None,
    numbers: Sequence[int | float],
    sizes: Sequence[int | float],
    examples: Examples,
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
            number = examples.present_before + program.present.index(replica)
            values.append(torch.tensor(number, dtype=torch.int64))
        elif argument.kind is ArgumentKind.NUM_REPLICAS:
            values.append(torch.tensor(examples.num_present or len(program.present), dtype=torch.int64))
        else:
            assert seed is not None
            values.append(torch.tensor(mix(seed, program.local_replicas[replica]), dtype=torch.int64))
    return values
