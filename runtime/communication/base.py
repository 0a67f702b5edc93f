"""The interface of communicators: each replica launches its part of a collective and waits for those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mirrorc.ir.devices import Device
from mirrorc.runtime.communication.rendezvous import Rendezvous, Tag
from mirrorc.runtime.devices.events import record_event, wait_event


class Communicator:
    """Performs the collectives of one link among the devices of one process.

    A subclass names its link and has the methods of the collectives that the link carries; `register_communicator` makes
    it known.

    Every method that takes ``replica`` is called from that replica's thread. Launches never block; waits do, for
    ``timeout_seconds`` at most.

    Args:
        devices: the devices, in order of replicas.
        timeout_seconds: bound of every wait.

    Attributes:
        link: the name of the link that the class implements, see `mirrorc.ir.links`.
    """

    link: ClassVar[str]

    def __init__(self, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.devices = devices
        self.timeout_seconds = timeout_seconds
        self._rendezvous: dict[Tag, Rendezvous] = {}

    def prepare(self, tags: Sequence[Tag]) -> None:
        """Makes places for the collectives of a program; called before it runs, and after a failure to begin afresh."""
        self._rendezvous = {tag: self._make_rendezvous(tag) for tag in tags}

    def _make_rendezvous(self, tag: Tag) -> Rendezvous:
        return Rendezvous(tag, self.devices, self.timeout_seconds)

    def release(self) -> None:
        """Forgets what replicas left in a step that all have finished, so that its memory is free until the next one."""

    def abort(self) -> None:
        """Wakes every replica that waits; they raise `Aborted`."""
        for rendezvous in self._rendezvous.values():
            rendezvous.abort()

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """Offers this replica's bucket (1-D, same length and dtype on all) for the sum; gives what `wait` needs."""
        raise self._not_carried("all_reduce")

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """The sum over all replicas, added in order of replicas: the same bits on every replica."""
        raise self._not_carried("all_reduce")

    def launch_reduce_scatter(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """As `launch_all_reduce`, for a sum of which every replica gets its share."""
        raise self._not_carried("reduce_scatter")

    def wait_reduce_scatter(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """This replica's share (`mirrorc.ir.buckets.share_bounds`) of the sum, the same bits as in an all_reduce."""
        raise self._not_carried("reduce_scatter")

    def _not_carried(self, operation: str) -> NotImplementedError:
        return NotImplementedError(
            f"link {self.link!r} does not carry {operation}: `Link.carries` says what it does, and the verifier checks it"
        )

    def send(self, bucket: int, replica: int, destination: int, tensor: torch.Tensor) -> None:
        """Offers a tensor to another replica; it must stay as it is until the next step's first reduction."""
        rendezvous = self._rendezvous[("send", bucket)]
        rendezvous.tensors[replica] = tensor
        rendezvous.events[replica] = record_event(tensor.device)
        rendezvous.announce_to(destination, replica)

    def receive(self, bucket: int, replica: int, source: int, pending: Any) -> torch.Tensor:
        """The tensor that ``source`` sends, on this replica's device."""
        rendezvous = self._rendezvous[("send", bucket)]
        rendezvous.await_replicas(replica, [source])
        wait_event(rendezvous.events[source])
        return rendezvous.tensors[source].to(self.devices[replica].torch_device, non_blocking=True)
