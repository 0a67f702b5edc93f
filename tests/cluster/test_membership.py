"""What workers find out about one another."""

import re
import threading
import time
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster.membership import Worker, call_roll, disagreement
from mirrorc.cluster.place import Place
from mirrorc.errors import CommunicationError

VERSIONS = {"torch": "2.13.0", "Python": "3.12"}


def worker(rank: int, num_workers: int = 3, versions: dict[str, str] = VERSIONS) -> Worker:
    return Worker(rank, num_workers, f"host-{rank}", 100 + rank, versions, "")


def called(places: list[Place], seconds: float = 60.0, store: Any = None) -> list[Any]:
    store = store or distributed.HashStore()
    found: list[Any] = [None] * len(places)

    def call(number: int) -> None:
        try:
            workers = call_roll(store, places[number], time.monotonic() + seconds)
            found[number] = [each.rank for each in workers]
        except CommunicationError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_workers_in_any_order_fit_together() -> None:
    assert disagreement([worker(2), worker(0), worker(1)]) == disagreement([]) == ""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            worker(2, 4),
            r"worker 0 \(host-0, process 100\) was told that there are 3, worker 2 \(host-2, .*that there are 4",
        ),
        (worker(1), "worker 1 .* and worker 1 .* have one rank"),
        (
            worker(2, versions={**VERSIONS, "torch": "2.12.0"}),
            r"runs torch 2\.13\.0, worker 2 .* torch 2\.12\.0\. Install",
        ),
        (worker(2, versions={"torch": "2.13.0"}), r"runs Python 3\.12, worker 2 .* Python None"),
    ],
)
def test_what_does_not_fit_is_said_of_both(other: Worker, expected: str) -> None:
    assert re.search(expected, disagreement([other, worker(1), worker(0)]))


def test_all_get_all_by_rank() -> None:
    assert called([Place(rank, 4, hosts_store=rank == 0) for rank in (3, 1, 0, 2)]) == [[0, 1, 2, 3]] * 4


@pytest.mark.slow
def test_those_that_do_not_come_are_named_by_all() -> None:
    came = called([Place(rank, 5) for rank in (0, 3)], seconds=0.3)
    assert len(set(came)) == 1 and "workers 1, 2 and 4 of 5 did not come in time" in came[0]


def test_one_that_comes_late_is_refused_and_the_others_are_not_disturbed() -> None:
    store = distributed.HashStore()
    assert called([Place(0, 2), Place(1, 2)], store=store) == [[0, 1]] * 2
    (late,) = called([Place(1, 2)], store=store)
    assert "came when all 2 workers had joined\n  why:  a worker cannot be replaced" in late


def test_worker_0_stays_until_all_have_read_what_is_wrong() -> None:
    """The third comes when the verdict is there; worker 0, whose store ends with it, still answers it."""
    store = distributed.HashStore()
    ends: list[float] = []

    def chief() -> None:
        called([Place(0, 3, hosts_store=True)], store=store)
        ends.append(time.monotonic())

    first = threading.Thread(target=chief)
    first.start()
    (second,) = called([Place(1, 2)], store=store)
    began = time.monotonic()
    (third,) = called([Place(2, 3)], store=store)
    first.join(60)
    assert second == third and "was told that there are 3" in second
    assert ends[0] >= began


def test_a_lost_store_is_said() -> None:
    class Lost:
        def add(self, *_: Any) -> int:
            raise distributed.DistNetworkError("Connection reset by peer\nframe #0: abort")

    with pytest.raises(
        CommunicationError, match=r"store at a:1 was lost while workers joined\n  why:  Connection reset by peer"
    ):
        call_roll(Lost(), Place(1, 2, "TF_CONFIG", "a", 1), time.monotonic() + 5)
