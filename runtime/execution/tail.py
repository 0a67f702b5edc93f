"""What is left of a step that has returned: waits for its last buckets and their updates, which the next call makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from mirrorc.ir.devices import Device
from mirrorc.runtime.communication.rendezvous import Aborted, Rendezvous


class Tail:
    """The rest of a step on all replicas. A replica's part goes on in the thread that asks for it, as far as it is asked for.

    Args:
        parts: of each replica, what tells the number of each bucket when the replica has updated its share of it, in one order.
        buckets: these buckets.
        devices: the devices, in order of replicas.
        timeout_seconds: the longest time that a replica waits for another one.
        on_updated: called with each bucket, in some thread, when all replicas have updated it.

    Attributes:
        buckets: as given.
        failures: the exceptions of the replicas whose part has failed; nothing goes on then.
    """

    def __init__(
        self,
        parts: Sequence[Iterator[int]],
        buckets: Sequence[int],
        devices: Sequence[Device],
        timeout_seconds: float,
        on_updated: Callable[[int], object],
    ) -> None:
        self.failures: dict[int, BaseException] = {}
        self._parts, self.buckets, self._on_updated = list(parts), tuple(buckets), on_updated
        self._done: list[set[int]] = [set() for _ in parts]
        self._missing = dict.fromkeys(self.buckets, len(self._parts))  # the replicas that have not updated it
        self._lock = threading.Lock()
        self._updates = {
            bucket: Rendezvous(f"the update of bucket {bucket}", devices, timeout_seconds) for bucket in self.buckets
        }

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has gone on with it."""
        return not (any(self._done) or self.failures)

    @property
    def is_done(self) -> bool:
        """Whether all replicas have updated all buckets."""
        return not any(self._missing.values())

    def await_update(self, replica: int, bucket: int) -> None:
        """Goes on with a replica's part until it has updated a bucket, and returns when all replicas have.

        Raises:
            Aborted: another replica has failed.
            CommunicationError: a sum did not come, or another replica did not.
        """
        self._go_on(replica, bucket)
        if self._missing[bucket]:
            self._updates[bucket].await_replicas(replica, range(len(self._parts)))

    def finish(self, replica: int) -> None:
        """Does all that is left of a replica's part; waits for no other replica. Raises as `await_update`."""
        for bucket in self.buckets:
            self._go_on(replica, bucket)

    def _go_on(self, replica: int, bucket: int) -> None:
        done = self._done[replica]
        while bucket not in done:
            if self.failures:
                raise Aborted
            try:
                updated = next(self._parts[replica])
            except BaseException as error:
                self.failures[replica] = error
                self.wake()
                raise
            done.add(updated)
            with self._lock:
                self._missing[updated] -= 1
                if not self._missing[updated]:
                    self._on_updated(updated)
            self._updates[updated].announce(replica)

    def wake(self) -> None:
        """Wakes replicas that wait for others in `await_update`; they raise `Aborted`."""
        for meeting in self._updates.values():
            meeting.abort()
