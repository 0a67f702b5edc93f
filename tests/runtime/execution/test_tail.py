"""What is left of a step goes on as far as it is asked for, on all replicas, and stops everywhere where one fails."""

import threading
from collections.abc import Iterator

import pytest

from mirrorc.ir.devices import parse_devices
from mirrorc.runtime.communication import Aborted
from mirrorc.runtime.execution.tail import Tail


class Parts:
    """The parts of two replicas, which note what they do; one may fail at a bucket."""

    def __init__(self, failing: tuple[int, int] | None = None) -> None:
        self.made: list[tuple[int, int]] = []
        self.updated: list[int] = []
        self._failing = failing
        parts = [self._part(replica) for replica in (0, 1)]
        self.tail = Tail(parts, (3, 4), parse_devices(2), 10.0, self.updated.append)

    def _part(self, replica: int) -> Iterator[int]:
        for bucket in (3, 4):
            if (replica, bucket) == self._failing:
                raise MemoryError("there is none")
            self.made.append((replica, bucket))
            yield bucket


def test_a_bucket_is_awaited_until_all_replicas_have_updated_it() -> None:
    parts = Parts()
    assert parts.tail.is_untouched and not parts.tail.is_done
    other = threading.Thread(target=parts.tail.await_update, args=(1, 4))
    other.start()
    parts.tail.await_update(0, 3)
    assert {(0, 3), (1, 3)} <= set(parts.made) and (0, 4) not in parts.made
    parts.tail.await_update(0, 4)
    other.join(10.0)
    assert not other.is_alive() and parts.tail.is_done and parts.updated == [3, 4]
    parts.tail.await_update(0, 3)  # nothing is left


def test_the_rest_is_done_without_meetings() -> None:
    parts = Parts()
    parts.tail.finish(0)
    assert parts.made == [(0, 3), (0, 4)] and not parts.tail.is_done and not parts.tail.is_untouched
    parts.tail.finish(1)
    assert parts.tail.is_done


def test_where_one_replica_fails_the_others_stop() -> None:
    parts, raised = Parts(failing=(1, 4)), []

    def wait() -> None:
        try:
            parts.tail.await_update(0, 4)
        except Aborted as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(MemoryError):
        parts.tail.finish(1)
    waiting.join(10.0)
    assert len(raised) == 1 and not parts.tail.is_done
    assert set(parts.tail.failures) == {1}
    with pytest.raises(Aborted):
        parts.tail.finish(1)
