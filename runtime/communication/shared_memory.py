"""Reductions among logical CPUs, which read each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.ir.routes import Route
from mirrorc.ir.variables import share_bounds
from mirrorc.runtime.communication.base import Communicator, register_communicator
from mirrorc.runtime.communication.rendezvous import Rendezvous, Tag
from mirrorc.runtime.state.shares.pieces import FactoredBucket, UnmadeShare, Visit, add_visited, unmade_sum


@register_communicator
class SharedMemoryCommunicator(Communicator):
    """Sums in replica 0's bucket, which all replicas read, so that nothing is copied."""

    link = "shared-memory"

    def prepare(self, tags: Sequence[Tag], routes: Sequence[Route] = ()) -> None:
        super().prepare(tags, routes)
        for kind, bucket in tags:
            if kind == "all_reduce":
                self._rendezvous[("summed", bucket)] = self._make_rendezvous(("all_reduce", bucket))

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        self._offer(self._rendezvous[("all_reduce", bucket)], replica, tensor)

    def launch_reduce_scatter(self, bucket: int, replica: int, tensor: torch.Tensor | FactoredBucket) -> Any:
        """All replicas must submit factors of the same gradients."""
        self._offer(self._rendezvous[("reduce_scatter", bucket)], replica, tensor)

    def launch_reduce(self, bucket: int, replica: int, tensor: torch.Tensor, root: int) -> Any:
        rendezvous = self._rendezvous[("reduce", bucket)]
        rendezvous.tensors[replica] = tensor
        rendezvous.announce_to(root, replica)

    def wait_reduce(self, bucket: int, replica: int, pending: Any, root: int) -> torch.Tensor:
        """The sum, in replica 0's bucket; an empty tensor on replicas other than ``root``."""
        rendezvous = self._rendezvous[("reduce", bucket)]
        if replica != root:
            return rendezvous.tensors[replica][:0]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        total, *others = rendezvous.tensors
        for tensor in others:
            total.add_(tensor)
        return total

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        if self.in_one_thread:
            total, *others = self._awaited(("all_reduce", bucket), replica)
            for other in others if replica == 0 else ():
                total.add_(other)
            return total
        self._made(("all_reduce", bucket), replica)
        summed = self._rendezvous[("summed", bucket)]
        summed.announce(replica)
        summed.await_replicas(replica, range(len(self.devices)))
        return self._rendezvous[("all_reduce", bucket)].tensors[0]

    def wait_reduce_scatter(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        return self._made(("reduce_scatter", bucket), replica)

    def wait_and_visit(self, bucket: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        return self._made(("reduce_scatter", bucket), replica, visit)

    def wait_unmade(self, bucket: int, replica: int, pending: Any) -> UnmadeShare:
        buckets = self._awaited(("reduce_scatter", bucket), replica)
        if isinstance(buckets[0], FactoredBucket):
            return _unmade_factors(buckets, replica)
        return unmade_sum(tuple(buckets), share_bounds(buckets[0].numel(), len(buckets), replica))

    def reset(self) -> None:
        for rendezvous in self._rendezvous.values():
            rendezvous.tensors = [None] * len(self.devices)
        for mailbox in self._mailboxes.values():
            mailbox.tensor = None

    def _offer(self, rendezvous: Rendezvous, replica: int, tensor: torch.Tensor | FactoredBucket) -> None:
        rendezvous.tensors[replica] = tensor
        rendezvous.announce(replica)

    def _made(self, tag: Tag, replica: int, visit: Visit | None = None) -> torch.Tensor:
        buckets = self._awaited(tag, replica)
        if isinstance(buckets[0], FactoredBucket):
            return _unmade_factors(buckets, replica, visit).make()
        start, stop = share_bounds(buckets[0].numel(), len(buckets), replica)
        total, others = buckets[0][start:stop], [bucket[start:stop] for bucket in buckets[1:]]
        if visit is not None:
            add_visited(total, others, visit)
            return total
        for other in others:
            total.add_(other)
        return total

    def _awaited(self, tag: Tag, replica: int) -> list[Any]:
        rendezvous = self._rendezvous[tag]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        return rendezvous.tensors


def _unmade_factors(buckets: Sequence[FactoredBucket], replica: int, change: Visit | None = None) -> UnmadeShare:
    bounds = share_bounds(buckets[0].tensor.numel(), len(buckets), replica)
    return UnmadeShare(tuple(buckets), buckets[replica].pieces, *bounds, change)
