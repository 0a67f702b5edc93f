"""The interface of communicators, and their registry by link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from mirrorc.errors import CommunicationError
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.devices import Device
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import calls_to, name_of, pack_of
from mirrorc.ir.program import Program
from mirrorc.ir.routes import Route, route_of
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication.rendezvous import Mailbox, Rendezvous, Tag
from mirrorc.runtime.devices.events import record_event, wait_event
from mirrorc.runtime.state.shares.pieces import FactoredBucket, UnmadeShare, Visit, unmade_sum, visit_parts


class Communicator:
    """Runs a link's collectives among the devices of a process; see `register_communicator`.

    Methods with ``replica`` are called in that replica's thread. Launches never block; waits block for at most
    ``timeout_seconds``. ``bucket`` is the number of the bucket, or of the pack if buckets are cut.

    Attributes:
        in_one_thread: replicas are interleaved in one thread. Replica 0 then waits first, after the launches of all.
    """

    link: ClassVar[str]
    in_one_thread = False

    def __init__(self, devices: Sequence[Device], timeout_seconds: float, unit: str = "bucket") -> None:
        self.devices = devices
        self.timeout_seconds, self.unit = timeout_seconds, unit
        self._rendezvous: dict[Tag, Rendezvous] = {}
        self._mailboxes: dict[Route, Mailbox] = {}
        self._prepared_for: tuple[Sequence[Tag], Sequence[Route]] = ((), ())

    def prepare(self, tags: Sequence[Tag], routes: Sequence[Route] = ()) -> None:
        self._prepared_for = (tags, routes)
        self._rendezvous = {tag: self._make_rendezvous(tag) for tag in tags}
        self._mailboxes = {route: Mailbox(route, self.devices, self.timeout_seconds) for route in routes}

    def begin_afresh(self) -> None:
        self.prepare(*self._prepared_for)

    def _make_rendezvous(self, tag: Tag) -> Rendezvous:
        return Rendezvous(f"{tag[0]} of {self.unit} {tag[1]}", self.devices, self.timeout_seconds)

    def reset(self) -> None:
        pass

    def abort(self) -> None:
        for rendezvous in self._rendezvous.values():
            rendezvous.abort()
        for mailbox in self._mailboxes.values():
            mailbox.abort()

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """Submits this replica's bucket, 1-D; returns a handle for `wait_all_reduce`."""
        raise self._not_carried("all_reduce")

    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """The sum, bitwise equal on all replicas. Replicas are added in order, except by libraries such as NCCL."""
        raise self._not_carried("all_reduce")

    def launch_reduce_scatter(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        raise self._not_carried("reduce_scatter")

    def wait_reduce_scatter(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """This replica's share of the sum, bitwise equal to an all_reduce."""
        raise self._not_carried("reduce_scatter")

    def launch_reduce(self, bucket: int, replica: int, tensor: torch.Tensor, root: int) -> Any:
        """Like `launch_all_reduce`, but only replica ``root`` gets the sum."""
        raise self._not_carried("reduce")

    def wait_reduce(self, bucket: int, replica: int, pending: Any, root: int) -> torch.Tensor:
        """The sum on replica ``root``, bitwise equal to an all_reduce. Other replicas do not wait."""
        raise self._not_carried("reduce")

    def wait_and_visit(self, bucket: int, replica: int, pending: Any, visit: Visit) -> torch.Tensor:
        """Like `wait_reduce_scatter`; ``visit`` is called with each part of the share, in order."""
        share = self.wait_reduce_scatter(bucket, replica, pending)
        visit_parts(share, visit)
        return share

    def wait_unmade(self, bucket: int, replica: int, pending: Any) -> UnmadeShare:
        """A share whose addends are complete. A subclass may leave the addition to the caller."""
        share = self.wait_reduce_scatter(bucket, replica, pending)
        return unmade_sum([share], (0, share.numel()))

    def launch_factors(self, bucket: int, replica: int, factored_bucket: FactoredBucket) -> Any:
        self._leave(("all_gather", bucket), replica, factored_bucket).announce(replica)

    def wait_factors(self, bucket: int, replica: int, pending: Any) -> Sequence[FactoredBucket]:
        """All replicas' buckets, in order, with factors on this replica's device."""
        rendezvous = self._rendezvous[("all_gather", bucket)]
        rendezvous.await_replicas(replica, range(len(self.devices)))
        for event in rendezvous.events:
            wait_event(event)
        home = self.devices[replica].torch_device
        return [_on_device(factored_bucket, home) for factored_bucket in rendezvous.tensors]

    def _leave(self, tag: Tag, replica: int, value: torch.Tensor | FactoredBucket) -> Rendezvous:
        rendezvous = self._rendezvous[tag]
        rendezvous.tensors[replica] = value
        rendezvous.events[replica] = record_event((value.tensor if isinstance(value, FactoredBucket) else value).device)
        return rendezvous

    def _not_carried(self, operation: str) -> NotImplementedError:
        return NotImplementedError(
            f"link {self.link!r} does not carry {operation}: `Link.carries` says what it does, and the verifier checks it"
        )

    def send(self, route: Route, tensor: torch.Tensor) -> None:
        """Sends a tensor, which must not be written until the step has ended on all replicas."""
        self._mailboxes[route].put(tensor)

    def launch_receive(self, route: Route) -> None:
        """Announces a later `receive` from the same thread. A link between processes starts the transfer here."""

    def receive(self, route: Route) -> torch.Tensor:
        """The sent tensor, on the receiver's device. It may be the sender's memory: do not write it."""
        return self._mailboxes[route].take()


def _on_device(bucket: FactoredBucket, device: torch.device) -> FactoredBucket:
    factors = [
        [tuple(factor.to(device, non_blocking=True) for factor in part) for part in gradient]
        for gradient in bucket.factors
    ]
    return FactoredBucket(bucket.tensor, factors, bucket.pieces)


_Class = TypeVar("_Class", bound=type[Communicator])
_communicators: dict[str, type[Communicator]] = {}


def register_communicator(communicator: _Class) -> _Class:
    """Registers a class for the link named by its attribute ``link``.

    Raises:
        ValueError: there is no such link, or another class implements it.
    """
    link = link_named(communicator.link).name
    if _communicators.setdefault(link, communicator) is not communicator:
        raise problem(
            ValueError,
            f"MC4005: {_communicators[link].__name__} implements the link {link!r} already",
            fix=f"give {communicator.__name__} a link of its own",
        )
    return communicator


def unregister_communicator(communicator: type[Communicator]) -> None:
    del _communicators[communicator.link]


def communicators_of(program: Program, timeout_seconds: float) -> dict[str, Communicator]:
    tags: dict[str, dict[Tag, None]] = {}
    routes: dict[str, dict[Route, None]] = {}  # a device sends some, and receives on others
    for module in program.device_graphs.values():
        for node in calls_to(module.graph, *ops.REDUCTIONS, ops.send, ops.recv):
            link = str(node.kwargs["link"])
            link_tags = tags.setdefault(link, {})
            if node.target in ops.REDUCTIONS:
                link_tags[(name_of(node), pack_of(node))] = None
            else:
                routes.setdefault(link, {})[route_of(program, node)] = None
    unit = "pack" if are_cut(program.buckets) else "bucket"
    communicators = {link: communicator_for(link, program.devices, timeout_seconds, unit) for link in tags}
    for link, communicator in communicators.items():
        communicator.prepare(list(tags[link]), list(routes.get(link, {})))
    return communicators


def communicator_for(
    link: str, devices: Sequence[Device], timeout_seconds: float, unit: str = "bucket"
) -> Communicator:
    if link not in _communicators:
        raise problem(
            CommunicationError,
            f"MC4005: nothing implements the link {link!r}",
            fix=f"declare a Communicator with link = {link!r} under @mirrorc.runtime.communication.register_communicator",
        )
    return _communicators[link](devices, timeout_seconds, unit)
