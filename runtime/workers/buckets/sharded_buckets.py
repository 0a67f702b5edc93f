"""Buckets whose updates are sharded over workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirrorc.runtime.workers.buckets.joint_launches import JointLaunches, Launch

_SUMS, _PARAMETERS = "sums", "parameters"


class ShardedBuckets:
    """Reduce-scatters sums and all-gathers new parameters, in shards of equal length, in the order of ranks.

    Gradients are sent by an all_to_all, and added in the order of ranks. This sends half the bytes of an all_reduce;
    gloo's reduce_scatter is slower.
    """

    def __init__(
        self,
        num_devices: int,
        buckets: Sequence[int],
        rank: int,
        num_workers: int,
        launch: Launch,
        timeout_seconds: float,
    ) -> None:
        tags = [(kind, bucket) for kind in (_SUMS, _PARAMETERS) for bucket in buckets]
        self._joint = JointLaunches(num_devices, tags, launch, timeout_seconds)
        self._num_devices, self._rank, self._num_workers = num_devices, rank, num_workers
        self.reset()

    def begin_afresh(self) -> None:
        self._joint.begin_afresh()
        self.reset()

    def reset(self) -> None:
        self._received: dict[int, torch.Tensor] = {}
        self._num_waiting: dict[int, int] = {}

    def abort(self) -> None:
        self._joint.abort()

    def launch_sums(self, bucket: int, whole: torch.Tensor) -> None:
        with self._joint.lock:
            if self._joint.is_last((_SUMS, bucket)):
                received = torch.empty_like(whole)
                self._received[bucket] = received.view(self._num_workers, -1)
                self._num_waiting[bucket] = self._num_devices
                self._joint.send((_SUMS, bucket), lambda group: group.all_to_all(whole, received))

    def wait_sums(self, bucket: int, replica: int, whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Writes elements ``start:stop`` of the sum over all workers into ``whole``, and returns this slice."""
        self._joint.wait((_SUMS, bucket), replica, bucket)
        share = whole[start:stop]
        received = self._received[bucket]
        first = self._rank * received.shape[1]
        parts = received[:, start - first : stop - first].unbind()
        torch.add(parts[0], parts[1], out=share)
        for part in parts[2:]:
            share.add_(part)
        with self._joint.lock:
            self._num_waiting[bucket] -= 1
            if not self._num_waiting[bucket]:
                del self._received[bucket]
        return share

    def launch_parameters(self, bucket: int, whole: torch.Tensor) -> None:
        with self._joint.lock:
            if self._joint.is_last((_PARAMETERS, bucket)):
                parts = whole.view(self._num_workers, -1).unbind()
                part = parts[self._rank].clone()  # a copy, as the all-gather writes the whole bucket
                self._joint.send((_PARAMETERS, bucket), lambda group: group.all_gather_whole(part, whole))

    def wait_parameters(self, bucket: int, replica: int) -> None:
        self._joint.wait((_PARAMETERS, bucket), replica, bucket)
