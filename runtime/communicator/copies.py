"""All-reduce by copies: every replica fetches the others' buckets and adds them up for itself."""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.runtime.communicator.base import Communicator, record_event, wait_event


class CopyCommunicator(Communicator):
    """Works on any devices: several logical ones on one GPU, GPUs with or without peer access, CPUs."""

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """See `Communicator`."""
        meeting = self._meetings[("all_reduce", bucket)]
        meeting.tensors[replica] = tensor
        meeting.events[replica] = record_event(tensor.device)
        meeting.announce(replica)
        return None

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """See `Communicator`."""
        meeting = self._meetings[("all_reduce", bucket)]
        meeting.await_replicas(replica, len(self.devices) - 1)
        own = self.devices[replica].torch_device
        for event in meeting.events:
            wait_event(event)
        first, *rest = meeting.tensors
        total = first.to(own, copy=True, non_blocking=True)
        for tensor in rest:
            total.add_(tensor.to(own, non_blocking=True))
        return total
