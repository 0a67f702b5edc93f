"""Thread synchronization of replicas."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.ir.routes import Route
from mirrorc.messages.problem import problem
from mirrorc.runtime.devices.events import record_event, wait_event

Tag = tuple[str, int]  # kind of collective, index of bucket


class Aborted(Exception):
    """Raised in a waiting replica if another replica has failed."""


class StepStoppedError(ExecutionError):
    """Raised for a step that another thread has stopped; no replica has failed."""


class Rendezvous:
    """A collective's rendezvous: each replica leaves a tensor, announces itself, and waits for the others."""

    def __init__(self, subject: str, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.subject = subject
        self.tensors: list[Any] = [None] * len(devices)
        self.events: list[Any] = [None] * len(devices)
        self._devices = devices
        self._timeout_seconds = timeout_seconds
        self._inboxes: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in devices]

    def announce(self, replica: int) -> None:
        for other in range(len(self._inboxes)):
            if other != replica:
                self._inboxes[other].put(replica)

    def announce_to(self, root: int, replica: int) -> None:
        if root != replica:
            self._inboxes[root].put(replica)

    def await_replicas(self, replica: int, awaited: Iterable[int]) -> None:
        missing = set(awaited) - {replica}
        while missing:
            missing.discard(self._receive(replica, missing))

    def await_anyone(self, replica: int) -> None:
        self._receive(replica, set(range(len(self._devices))) - {replica})

    def _receive(self, replica: int, missing: set[int]) -> int:
        try:
            came = self._inboxes[replica].get(timeout=self._timeout_seconds)
        except queue.Empty:
            missed = [self._devices[r] for r in sorted(missing)]
            raise too_late(self._devices[replica], self._timeout_seconds, self.subject, missed) from None
        if came is None:
            raise Aborted
        return came

    def abort(self) -> None:
        for inbox in self._inboxes:
            for _ in self._devices:
                inbox.put(None)


class Mailbox:
    """A single send: the sender leaves a tensor and continues; the receiver waits for it.

    Attributes:
        tensor: held until the next step, because a GPU may copy it after `take`.
    """

    def __init__(self, route: Route, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.tensor: torch.Tensor | None = None
        self._route, self._devices, self._timeout_seconds = route, devices, timeout_seconds
        self._inbox: queue.SimpleQueue[tuple[torch.Tensor, Any] | None] = queue.SimpleQueue()

    def put(self, tensor: torch.Tensor) -> None:
        """Sends the value that the tensor has after all work queued on its device."""
        self.tensor = tensor
        self._inbox.put((tensor, record_event(tensor.device)))

    def take(self) -> torch.Tensor:
        """The tensor on the receiver's device; on the CPU, the sent object."""
        route, device = self._route, self._devices[self._route.destination]
        try:
            came = self._inbox.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise too_late(device, self._timeout_seconds, f"send of {route}", [self._devices[route.source]]) from None
        if came is None:
            raise Aborted
        tensor, event = came
        wait_event(event)
        return tensor.to(device.torch_device, non_blocking=True)

    def abort(self) -> None:
        self._inbox.put(None)


def too_late(device: Device, seconds: float, subject: str, missing: Sequence[Device]) -> CommunicationError:
    return problem(
        CommunicationError,
        f"MC5007: {device} waited {seconds:g} s in {subject} for {', '.join(map(str, missing))}",
        "a replica hangs or is far slower",
        (
            f"py-spy dump --pid {os.getpid()}, which shows where it stands",
            f"communication=mirrorc.Communication(timeout={2 * seconds:g}), for a longer wait",
        ),
    )
