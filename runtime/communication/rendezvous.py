"""Where the replicas of one process meet for a collective."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from typing import Any

from mirrorc.errors import CommunicationError
from mirrorc.ir.devices import Device

Tag = tuple[str, int]  # kind of collective, index of bucket


class Aborted(Exception):
    """Raised in a replica that waits for one that failed."""


class Rendezvous:
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
