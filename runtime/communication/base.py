"""How replicas meet: each launches its part of a collective, and waits for the parts of the others."""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mirrorc.errors import CommunicationError
from mirrorc.ir.program import Device

Tag = tuple[str, int]  # kind of collective, index of bucket


class Aborted(Exception):
    """Raised in a replica that waits for one that failed."""


class Meeting:
    """A place for one collective: replicas leave a tensor each, and wait until all have come."""

    def __init__(self, tag: Tag, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.tag = tag
        self.tensors: list[Any] = [None] * len(devices)
        self.events: list[Any] = [None] * len(devices)
        self._devices = devices
        self._timeout_seconds = timeout_seconds
        self._inboxes: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in devices]

    def announce(self, replica: int) -> None:
        """Tells all others that this replica has come."""
        for other in range(len(self._inboxes)):
            if other != replica:
                self.announce_to(other, replica)

    def announce_to(self, other: int, replica: int) -> None:
        """Tells one other replica that this one has come."""
        self._inboxes[other].put(replica)

    def await_replicas(self, replica: int, awaited: Iterable[int]) -> None:
        """Returns when these other replicas have come; nobody else announces himself here.

        Raises:
            Aborted: another replica failed.
            CommunicationError: they did not come in time.
        """
        missing = set(awaited) - {replica}
        while missing:
            missing.discard(self._receive(replica, missing))

    def await_anyone(self, replica: int) -> None:
        """Returns when one other replica has come; raises as `await_replicas`."""
        self._receive(replica, set(range(len(self._devices))) - {replica})

    def _receive(self, replica: int, missing: set[int]) -> int:
        try:
            came = self._inboxes[replica].get(timeout=self._timeout_seconds)
        except queue.Empty:
            names = ", ".join(str(self._devices[r]) for r in sorted(missing))
            raise CommunicationError(
                f"{self._devices[replica]} waited {self._timeout_seconds:g} s in {self.tag[0]} of bucket {self.tag[1]} "
                f"for {names}: a replica hangs or is far slower; see what it does, or raise timeout_seconds"
            ) from None
        if came is None:
            raise Aborted
        return came

    def abort(self) -> None:
        """Wakes every replica that waits here."""
        for inbox in self._inboxes:
            for _ in self._devices:
                inbox.put(None)


class Communicator(ABC):
    """Carries out collectives among the devices of one process.

    Every method that takes ``replica`` is called from that replica's thread. Launches never block; waits do, for
    ``timeout_seconds`` at most.

    Args:
        devices: the devices, in order of replicas.
        timeout_seconds: bound of every wait.
    """

    def __init__(self, devices: Sequence[Device], timeout_seconds: float) -> None:
        self.devices = devices
        self.timeout_seconds = timeout_seconds
        self._meetings: dict[Tag, Meeting] = {}

    def prepare(self, tags: Sequence[Tag]) -> None:
        """Makes places for the collectives of a program; called before it runs, and after a failure to begin afresh."""
        self._meetings = {tag: self._make_meeting(tag) for tag in tags}

    def _make_meeting(self, tag: Tag) -> Meeting:
        return Meeting(tag, self.devices, self.timeout_seconds)

    def release(self) -> None:  # noqa: B027 - there need be nothing to forget
        """Forgets what replicas left in a step that all have finished, so that its memory is free until the next one."""

    def abort(self) -> None:
        """Wakes every replica that waits; they raise `Aborted`."""
        for meeting in self._meetings.values():
            meeting.abort()

    @abstractmethod
    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """Offers this replica's bucket (1-D, same length and dtype on all) for the sum; gives what `wait` needs."""

    @abstractmethod
    def wait_all_reduce(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """The sum over all replicas, added in order of replicas: the same bits on every replica."""

    @abstractmethod
    def launch_reduce_scatter(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        """As `launch_all_reduce`, for a sum of which every replica gets its share."""

    @abstractmethod
    def wait_reduce_scatter(self, bucket: int, replica: int, pending: Any) -> torch.Tensor:
        """This replica's share (`mirrorc.ir.program.share_bounds`) of the sum, the same bits as in an all_reduce."""

    def send(self, bucket: int, replica: int, destination: int, tensor: torch.Tensor) -> None:
        """Offers a tensor to another replica; it must stay as it is until the next step's first reduction."""
        meeting = self._meetings[("send", bucket)]
        meeting.tensors[replica] = tensor
        meeting.events[replica] = record_event(tensor.device)
        meeting.announce_to(destination, replica)

    def receive(self, bucket: int, replica: int, source: int, pending: Any) -> torch.Tensor:
        """The tensor that ``source`` sends, on this replica's device."""
        meeting = self._meetings[("send", bucket)]
        meeting.await_replicas(replica, [source])
        wait_event(meeting.events[source])
        return meeting.tensors[source].to(self.devices[replica].torch_device, non_blocking=True)


def record_event(device: torch.device) -> Any:
    """Marks what is queued on the current stream of a GPU; None on the CPU, where work is done when a call returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_device(device: torch.device) -> None:
    """Returns when a GPU has done all that it was given; at once for a CPU, or for a GPU that is broken."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # it fails again wherever it is used next
            torch.cuda.synchronize(device)


def wait_event(event: Any, device: torch.device | None = None) -> None:
    """Lets the current stream of a GPU, of the current one by default, wait for an event of `record_event`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
