"""Memory for large results of regions, reused in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirrorc.ir.devices import Device

OF_PARTS = -1
"""The block for parts of gradients."""


class ReservedMemory:
    """Blocks of memory by replica and number, which all programs of a step reuse.

    A block is allocated at its first use, grows on demand, and stays until the step is closed.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = [device.torch_device for device in devices]
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}

    def block(self, replica: int, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialized tensor in a block; thread-safe across replicas."""
        num_elements = torch.Size(shape).numel()
        num_bytes = num_elements * dtype.itemsize
        block = self._blocks.get((replica, number))
        if block is None or block.numel() < num_bytes:
            del block
            self._blocks.pop((replica, number), None)  # freed before the larger one is allocated
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self._devices[replica])
            self._blocks[replica, number] = block
        return block[:num_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        self._blocks.clear()
