"""Synchronizes the threads of replicas that exchange tensors: a rendezvous for a collective, a mailbox for a send."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.ir.routes import Route
from mirrorc.runtime.devices.events import record_event, wait_event

Tag = tuple[str, int]  # kind of collective, index of bucket


class Aborted(Exception):
    """Raised in a replica that waits when another replica has failed."""


class StepStoppedError(ExecutionError):
    """Raised for a step in which no replica has failed: another thread has stopped it."""


class Rendezvous:
    """Serves one collective: each replica leaves a tensor, announces itself, and waits until the others have done so.

    Args:
        what: what it is for, in words of a message.
        devices: the devices, in order of replicas.
        timeout_seconds: the longest time that a replica waits.
    """

    def __init__(self, what: str, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.what = what
        self.tensors: list[Any] = [None] * len(devices)
        self.events: list[Any] = [None] * len(devices)
        self._devices = devices
        self._timeout_seconds = timeout_seconds
        self._inboxes: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in devices]

    def announce(self, replica: int) -> None:
        """Tells all other replicas that this one has left its tensor."""
        for other in range(len(self._inboxes)):
            if other != replica:
                self._inboxes[other].put(replica)

    def announce_to(self, root: int, replica: int) -> None:
        """Tells one replica alone that this one has left its tensor; no other one may wait here."""
        if root != replica:
            self._inboxes[root].put(replica)

    def await_replicas(self, replica: int, awaited: Iterable[int]) -> None:
        """Returns when these other replicas have announced themselves.

        Raises:
            Aborted: another replica failed.
            CommunicationError: they did not announce themselves in time.
        """
        missing = set(awaited) - {replica}
        while missing:
            missing.discard(self._receive(replica, missing))

    def await_anyone(self, replica: int) -> None:
        """Returns when one other replica has announced itself; raises as `await_replicas` does."""
        self._receive(replica, set(range(len(self._devices))) - {replica})

    def _receive(self, replica: int, missing: set[int]) -> int:
        try:
            came = self._inboxes[replica].get(timeout=self._timeout_seconds)
        except queue.Empty:
            missed = [self._devices[r] for r in sorted(missing)]
            raise _too_late(self._devices[replica], self._timeout_seconds, self.what, missed) from None
        if came is None:
            raise Aborted
        return came

    def abort(self) -> None:
        """Wakes every replica that waits here."""
        for inbox in self._inboxes:
            for _ in self._devices:
                inbox.put(None)


class Mailbox:
    """A place for one send: the sender leaves a tensor and goes on, the receiver waits for it.

    Attributes:
        tensor: the last tensor that was sent; kept until the next step, because a GPU may copy it after `take` has returned.
    """

    def __init__(self, route: Route, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.tensor: torch.Tensor | None = None
        self._route, self._devices, self._timeout_seconds = route, devices, timeout_seconds
        self._inbox: queue.SimpleQueue[tuple[torch.Tensor, Any] | None] = queue.SimpleQueue()

    def put(self, tensor: torch.Tensor) -> None:
        """Offers a tensor; the receiver gets its value after the work that is queued on its device so far."""
        self.tensor = tensor
        self._inbox.put((tensor, record_event(tensor.device)))

    def take(self) -> torch.Tensor:
        """The tensor that was offered, on the receiver's device; on the CPU, the very same one.

        Raises:
            Aborted: another replica failed.
            CommunicationError: nothing came in time.
        """
        route, own = self._route, self._devices[self._route.destination]
        try:
            came = self._inbox.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise _too_late(own, self._timeout_seconds, f"send of {route}", [self._devices[route.source]]) from None
        if came is None:
            raise Aborted
        tensor, event = came
        wait_event(event)
        return tensor.to(own.torch_device, non_blocking=True)

    def abort(self) -> None:
        """Wakes the receiver."""
        self._inbox.put(None)


def _too_late(own: Device, seconds: float, what: str, missing: Sequence[Device]) -> CommunicationError:
    return CommunicationError(
        f"{own} waited {seconds:g} s in {what} for {', '.join(map(str, missing))}: a replica hangs or is far slower; see what "
        "it does, or raise timeout_seconds"
    )
