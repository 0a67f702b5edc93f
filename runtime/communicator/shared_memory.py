"""All-reduce among logical CPUs: each device sums its share of the bucket, straight from the others' memory."""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.runtime.communicator.base import Communicator

_SHARE_ELEMENTS = 64  # shares begin at multiples of it, so that no two devices write to one cache line


class SharedMemoryCommunicator(Communicator):
    """The sum is made in replica 0's bucket and read there by all: nothing is copied.

    A bucket of ``n`` elements on ``N`` devices costs each device ``(N + 1) * n / N`` elements of memory traffic.
    """

    def prepare(self, tags: Any) -> None:
        """As in the base class; each all_reduce gets a second meeting, for when the shares are summed."""
        super().prepare(tags)
        for kind, bucket in tags:
            if kind == "all_reduce":
                self._meetings[("summed", bucket)] = self._make_meeting(("all_reduce", bucket))

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """See `Communicator`."""
        meeting = self._meetings[("all_reduce", bucket)]
        meeting.tensors[replica] = tensor
        meeting.announce(replica)
        return None

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """See `Communicator`."""
        others = len(self.devices) - 1
        meeting = self._meetings[("all_reduce", bucket)]
        meeting.await_replicas(replica, others)
        first, *rest = meeting.tensors
        start, stop = share(first.numel(), len(self.devices), replica)
        if start < stop:
            total = first[start:stop]
            for tensor in rest:
                total.add_(tensor[start:stop])
        summed = self._meetings[("summed", bucket)]
        summed.announce(replica)
        summed.await_replicas(replica, others)
        return first


def share(num_elements: int, num_replicas: int, replica: int) -> tuple[int, int]:
    """The part of a bucket that a replica sums: first element and one past the last."""
    units = -(-num_elements // _SHARE_ELEMENTS)
    bounds = [min(num_elements, units * r // num_replicas * _SHARE_ELEMENTS) for r in (replica, replica + 1)]
    return bounds[0], bounds[1]
