"""Copies of batches to a GPU."""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.runtime.devices.events import copied_to, record_event, reserve_for, wait_event


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
