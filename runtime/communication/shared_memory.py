"""Reductions among logical CPUs: each device sums its share of the bucket, straight from the others' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.ir.routes import Route
from mirrorc.ir.variables import share_bounds
from mirrorc.runtime.communication.base import Communicator
from mirrorc.runtime.communication.registry import register_communicator
from mirrorc.runtime.communication.rendezvous import Rendezvous, Tag
from mirrorc.runtime.state.shares.gradient_shares import UnmadeShare, make_or_leave, make_share
from mirrorc.runtime.state.shares.lazy_pieces import UnmadePieces
from mirrorc.runtime.state.shares.pieces import FactoredBucket, Leaves, Visit, add_visited


@register_communicator
class SharedMemoryCommunicator(Communicator):
    """Computes the sum in replica 0's bucket, where all replicas read it, so that nothing is copied.

    A bucket of ``n`` elements on ``N`` devices costs each device ``(N + 1) * n / N`` elements of memory traffic.
    """

    link = "shared-memory"

    def prepare(self, tags: Sequence[Tag], routes: Sequence[Route] = ()) -> None:
        """As in the base class; each all_reduce gets a second rendezvous, for when the shares are summed."""
        super().prepare(tags, routes)
        for kind, bucket in tags:
            if kind == "all_reduce":
                self._rendezvous[("summed", bucket)] = self._make_rendezvous(("all_reduce", bucket))

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """See `Communicator`."""
        self._offer(self._rendezvous[("all_reduce", bucket)], replica, tensor)

    def launch_reduce_scatter(self, bucket: int, replica: int, tensor: torch.Tensor | FactoredBucket) -> Any:
        """As in the base class. The bucket may have gradients that are left as factors, if all replicas leave the same ones."""
        self._offer(self._rendezvous[("reduce_scatter", bucket)], replica, tensor)

    def launch_reduce(self, bucket: int, replica: int, tensor: torch.Tensor, root: int) -> Any:
        """See `Communicator`."""
        rendezvous = self._rendezvous[("reduce", bucket)]
        rendezvous.tensors[replica] = tensor
        rendezvous.announce_to(root, replica)

    def wait_reduce(self, bucket: int, replica: int, pending: Any, root: int) -> torch.Tensor:
        """See `Communicator`; the sum lies in replica 0's bucket, which is added up in the order of replicas."""
        rendezvous = self._rendezvous[("reduce", bucket)]
        if replica != root:
            return rendezvous.tensors[replica][:0]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        total, *others = rendezvous.tensors
        for tensor in others:
            total.add_(tensor)
        return total

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """See `Communicator`."""
        rendezvous = self._rendezvous[("all_reduce", bucket)]
        self._sum_share(rendezvous, replica)
        summed = self._rendezvous[("summed", bucket)]
        summed.announce(replica)
        summed.await_replicas(replica, range(len(self.devices)))
        return rendezvous.tensors[0]

    def wait_reduce_scatter(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """See `Communicator`."""
        return self._sum_share(self._rendezvous[("reduce_scatter", bucket)], replica)

    def wait_and_visit(self, bucket: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        """See `Communicator`; a part is visited as soon as it is made."""
        return self._sum_share(self._rendezvous[("reduce_scatter", bucket)], replica, visit)

    def wait_unmade(self, bucket: int, replica: int, pending: Any) -> UnmadeShare:
        """See `Communicator`."""
        rendezvous = self._rendezvous[("reduce_scatter", bucket)]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        buckets = rendezvous.tensors
        bounds = share_bounds(buckets[0].tensor.numel(), len(self.devices), replica)
        return UnmadeShare(tuple(buckets), buckets[replica].pieces, *bounds)

    def wait_and_leave(
        self, bucket: int, replica: int, pending: Any, visit: Visit, leaves: Leaves
    ) -> tuple[torch.Tensor, UnmadePieces | None]:
        """See `Communicator`."""
        rendezvous = self._rendezvous[("reduce_scatter", bucket)]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        if not isinstance(rendezvous.tensors[0], FactoredBucket):
            return self._made_share(rendezvous.tensors, replica, visit), None
        buckets: tuple[FactoredBucket, ...] = tuple(rendezvous.tensors)
        left = make_or_leave(buckets, replica, visit, leaves)
        whole = buckets[0].tensor
        return whole[slice(*share_bounds(whole.numel(), len(self.devices), replica))], left

    def release(self) -> None:
        """See `Communicator`."""
        for rendezvous in self._rendezvous.values():
            rendezvous.tensors = [None] * len(self.devices)
        for mailbox in self._mailboxes.values():
            mailbox.tensor = None

    def _offer(self, rendezvous: Rendezvous, replica: int, tensor: torch.Tensor | FactoredBucket) -> None:
        rendezvous.tensors[replica] = tensor
        rendezvous.announce(replica)

    def _sum_share(self, rendezvous: Rendezvous, replica: int, visit: Visit | None = None) -> torch.Tensor:
        rendezvous.await_replicas(replica, range(len(self.devices)))
        return self._made_share(rendezvous.tensors, replica, visit)

    def _made_share(self, buckets: Sequence[Any], replica: int, visit: Visit | None) -> torch.Tensor:
        is_factored = isinstance(buckets[0], FactoredBucket)
        whole = buckets[0].tensor if is_factored else buckets[0]
        start, stop = share_bounds(whole.numel(), len(self.devices), replica)
        total = whole[start:stop]
        if is_factored:
            make_share(buckets, replica, visit)
        elif visit is not None:
            add_visited([tensor[start:stop] for tensor in buckets[1:]], total, visit)
        else:
            for tensor in buckets[1:]:
                total.add_(tensor[start:stop])
        return total
