"""Reductions that copy the other replicas' buckets."""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.ir.variables import share_bounds
from mirrorc.runtime.communication.base import Communicator, register_communicator
from mirrorc.runtime.devices.events import wait_event


@register_communicator
class CopyCommunicator(Communicator):
    """All-reduces on any devices, such as logical devices on one GPU."""

    link = "copy"

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        self._leave(("all_reduce", bucket), replica, tensor).announce(replica)

    def launch_reduce_scatter(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        self._leave(("reduce_scatter", bucket), replica, tensor).announce(replica)

    def launch_reduce(self, bucket: int, replica: int, tensor: torch.Tensor, root: int) -> Any:
        self._leave(("reduce", bucket), replica, tensor).announce_to(root, replica)

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        return self._sum("all_reduce", bucket, replica, slice(None))

    def wait_reduce_scatter(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        num_elements = self._rendezvous[("reduce_scatter", bucket)].tensors[replica].numel()
        share = slice(*share_bounds(num_elements, len(self.devices), replica))
        return self._sum("reduce_scatter", bucket, replica, share)

    def wait_reduce(self, bucket: int, replica: int, pending: Any, root: int) -> torch.Tensor:
        if replica != root:
            return self._rendezvous[("reduce", bucket)].tensors[replica][:0]
        return self._sum("reduce", bucket, replica, slice(None))

    def _sum(self, kind: str, bucket: int, replica: int, part: slice) -> torch.Tensor:
        rendezvous = self._rendezvous[(kind, bucket)]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        device = self.devices[replica].torch_device
        for event in rendezvous.events:
            wait_event(event)
        first, *rest = rendezvous.tensors
        total = first[part].to(device, copy=True, non_blocking=True)
        for tensor in rest:
            total.add_(tensor[part].to(device, non_blocking=True))
        return total
