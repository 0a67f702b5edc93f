"""Collectives between workers that one device launches for all devices of its worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Iterable

from mirrorc.runtime.communication import Aborted
from mirrorc.runtime.workers.transport.lane import Done, LostConnectionError, PayloadError, in_words
from mirrorc.torch_internals import GlooGroup

Launch = Callable[[Callable[[GlooGroup], object], Done], None]
"""Launches a collective between workers, like `mirrorc.runtime.workers.transport.lane.Lane.launch`."""

_SLACK_SECONDS = 2.0  # a lane has a timeout of its own, with a better message


class JointLaunches:
    """The last device to arrive launches a collective for all devices. Each device then waits for its end.

    Args:
        tags: keys of the collectives; each is launched once in a step.

    Attributes:
        lock: must be held from `is_last` to the launch.
    """

    def __init__(self, num_devices: int, tags: Iterable[Hashable], launch: Launch, timeout_seconds: float) -> None:
        self.lock = threading.Lock()
        self._num_devices, self._tags, self._launch = num_devices, tuple(tags), launch
        self._timeout_seconds = timeout_seconds
        self.begin_afresh()

    def begin_afresh(self) -> None:
        self.under_way: set[Hashable] = set()
        self._missing = dict.fromkeys(self._tags, self._num_devices)  # the devices that have not launched yet
        self._inboxes: dict[Hashable, list[queue.SimpleQueue[Exception | None]]] = {
            tag: [queue.SimpleQueue() for _ in range(self._num_devices)] for tag in self._tags
        }

    def is_last(self, tag: Hashable) -> bool:
        """Counts a device's launch; True if all devices have launched."""
        self._missing[tag] -= 1
        if self._missing[tag]:
            return False
        self._missing[tag] = self._num_devices
        return True

    def send(self, tag: Hashable, collective: Callable[[GlooGroup], object] | None) -> None:
        """Launches a collective that wakes all devices at its end; None if there is nothing to send."""
        inboxes = self._inboxes[tag]
        self.under_way.add(tag)

        def done(error: Exception | None) -> None:
            if self._inboxes.get(tag) is inboxes:  # otherwise the step has failed since
                self.under_way.discard(tag)
            for inbox in inboxes:
                inbox.put(error)

        if collective is not None:
            self._launch(collective, done)
        else:
            done(None)

    def wait(self, tag: Hashable, replica: int, subject: str) -> None:
        """Makes a device wait until a collective is done."""
        try:
            error = self._inboxes[tag][replica].get(timeout=self._timeout_seconds + _SLACK_SECONDS)
        except queue.Empty:
            raise LostConnectionError(
                f"{subject} was not exchanged with the other workers within {self._timeout_seconds:g} s"
            ) from None
        if isinstance(error, Aborted):
            raise error
        if isinstance(error, PayloadError):
            raise PayloadError(str(error)) from error  # several devices raise it
        if error is not None:
            raise LostConnectionError(
                f"{subject} could not be exchanged with the other workers: {in_words(error)}"
            ) from error

    def abort(self) -> None:
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                inbox.put(Aborted())
