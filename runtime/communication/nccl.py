"""All-reduce among distinct GPUs by NCCL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.cuda import nccl

from mirrorc.ir.devices import Device
from mirrorc.ir.routes import Route
from mirrorc.runtime.communication.base import Communicator, register_communicator
from mirrorc.runtime.communication.rendezvous import Tag
from mirrorc.runtime.devices.events import wait_event

_HIGH = -1  # of the priorities of CUDA's streams; 0 is the default
_launching = threading.Lock()
"""Torch keeps NCCL's communicators in an unguarded map, and NCCL forbids parallel launches on one GPU."""


@register_communicator
class NcclCommunicator(Communicator):
    """All-reduces on side streams. The last replica launches for all: all GPUs have one order of collectives."""

    link = "nccl"

    def __init__(self, devices: Sequence[Device], timeout_seconds: float, unit: str = "bucket") -> None:
        super().__init__(devices, timeout_seconds, unit)
        # a wait for a bucket is a wait for all replicas, so its few blocks have priority over backward
        self._streams = [torch.cuda.Stream(device.torch_device, priority=_HIGH) for device in devices]
        self._offers: dict[int, int] = {}

    def prepare(self, tags: Sequence[Tag], routes: Sequence[Route] = ()) -> None:
        super().prepare(tags, routes)
        self._offers = {bucket: 0 for _, bucket in tags}

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        rendezvous = self._leave(("all_reduce", bucket), replica, tensor)
        with _launching:
            self._offers[bucket] += 1
            is_last = self._offers[bucket] == len(self.devices)
            if is_last:
                self._offers[bucket] = 0
                for stream, event in zip(self._streams, rendezvous.events, strict=True):
                    stream.wait_event(event)
                nccl.all_reduce(rendezvous.tensors, outputs=rendezvous.tensors, streams=self._streams)
                for r, stream in enumerate(self._streams):
                    rendezvous.events[r] = stream.record_event()
        if is_last:
            rendezvous.announce(replica)
        return is_last

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        rendezvous = self._rendezvous[("all_reduce", bucket)]
        if not pending:
            rendezvous.await_anyone(replica)  # the replica that offered last, and launched
        wait_event(rendezvous.events[replica])
        return rendezvous.tensors[replica]
