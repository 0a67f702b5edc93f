"""The point at which all replicas decide together that a step takes place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mirrorc.ir.devices import Device
from mirrorc.runtime.communication.rendezvous import Aborted, Rendezvous

_TAKES_PLACE, _SKIPPED, _STOPPED = "takes place", "skipped", "stopped"


class CommitPoint:
    """Lets a step take place on all replicas or on none.

    A step is decided once: by the first replica that has met all others, or by whoever stops it before. Both are one operation
    that no thread and no signal can divide, so all see the same decision. A step may also be skipped, see `skip`.

    Args:
        devices: the devices, in order of replicas.
        timeout_seconds: the longest time that a replica waits for the others.
    """

    def __init__(self, devices: Sequence[Device], timeout_seconds: float) -> None:
        self._devices, self._timeout_seconds = devices, timeout_seconds
        self._all = range(len(devices))
        self._decision: dict[str, str] = {}
        self._is_suspended = False
        self._rendezvous = self._make_rendezvous()

    def _make_rendezvous(self) -> Rendezvous:
        return Rendezvous("the commit", self._devices, self._timeout_seconds)

    @property
    def is_committed(self) -> bool:
        """Whether the present step, or otherwise the last one, takes place: nothing stops it any more."""
        return self._decision.get("step") is _TAKES_PLACE

    @property
    def is_skipped(self) -> bool:
        """Whether all replicas leave the updates of the step out, and return its loss."""
        return self._decision.get("step") is _SKIPPED

    @property
    def is_decided(self) -> bool:
        """Whether the step takes place or is skipped: nothing stops it any more."""
        return self._decision.get("step") in (_TAKES_PLACE, _SKIPPED)

    def begin(self) -> None:
        """Begins a step, which is not decided yet."""
        self._decision = {}

    def begin_afresh(self) -> None:
        """Forgets who has come, after a step that was stopped."""
        self._rendezvous = self._make_rendezvous()

    def stop(self) -> bool:
        """Stops the step unless it is decided; returns whether it is stopped. Replicas that come later raise `Aborted`."""
        return self._decision.setdefault("step", _STOPPED) is _STOPPED

    def revoke(self) -> None:
        """Records that a committed step was undone."""
        self._decision = {"step": _STOPPED}

    def commit(self) -> None:
        """Decides that the step takes place; raises `Aborted` if it is stopped."""
        if not self._is_suspended and self._decision.setdefault("step", _TAKES_PLACE) is not _TAKES_PLACE:
            raise Aborted

    def skip(self) -> None:
        """Decides that the step is skipped; raises `Aborted` if it is stopped."""
        if self._decision.setdefault("step", _SKIPPED) is not _SKIPPED:
            raise Aborted

    def abort(self) -> None:
        """Wakes every replica that waits here; they raise `Aborted`."""
        self._rendezvous.abort()

    def arrive(self, replica: int) -> None:
        """Tells that a replica has done all that can fail; never blocks."""
        self._rendezvous.announce(replica)

    def leave(self, replica: int) -> None:
        """Returns when all replicas have arrived and the step takes place.

        Raises:
            Aborted: the step is stopped.
            CommunicationError: the others did not arrive in time.
        """
        self._rendezvous.await_replicas(replica, self._all)
        self.commit()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it, replicas pass without a decision, because calls are only recorded."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False
