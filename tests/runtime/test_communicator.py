import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mirrorc.devices import parse_devices
from mirrorc.errors import CommunicationError
from mirrorc.runtime.communicator import (
    Aborted,
    Communicator,
    CopyCommunicator,
    SharedMemoryCommunicator,
    communicator_for,
)

LINKS = ("shared-memory", "copy")
KINDS = ("all_reduce", "reduce_scatter", "broadcast")
PATIENT, IMPATIENT = 60.0, 0.05  # seconds; the latter only where nobody will come


def communicator(link: str, num_replicas: int, timeout_seconds: float = PATIENT, num_buckets: int = 1) -> Communicator:
    made = communicator_for(link, parse_devices([f"cpu:{i}" for i in range(num_replicas)]), timeout_seconds)
    made.prepare([(kind, bucket) for kind in KINDS for bucket in range(num_buckets)])
    return made


def on_threads(num_replicas: int, job: Callable[[int], Any]) -> list[Any]:
    """What a job gives, or raises, on one thread for each replica."""
    results: list[Any] = [None] * num_replicas

    def run(replica: int) -> None:
        try:
            results[replica] = job(replica)
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[replica] = error

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * PATIENT)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 1000, 4097])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("link", LINKS)
def test_every_replica_gets_the_sequential_sum_bit_for_bit(
    link: str, num_replicas: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    buckets = [torch.randn(size).to(dtype) * 10.0**i for i in range(num_replicas)]
    expected = functools.reduce(torch.add, [bucket.clone() for bucket in buckets])
    comm = communicator(link, num_replicas)

    def job(replica: int) -> torch.Tensor:
        pending = comm.launch_all_reduce(0, replica, buckets[replica])
        return comm.wait_all_reduce(0, replica, pending).clone()

    for found in on_threads(num_replicas, job):
        assert torch.equal(found, expected) and found.dtype is dtype


@pytest.mark.parametrize("link", LINKS)
def test_steps_and_buckets_follow_each_other_without_mixing(link: str) -> None:
    num_replicas, num_buckets, num_steps = 3, 4, 20
    comm = communicator(link, num_replicas, num_buckets=num_buckets)
    memory = [[torch.empty(100) for _ in range(num_buckets)] for _ in range(num_replicas)]
    step_ends = threading.Barrier(num_replicas)

    def job(replica: int) -> list[list[float]]:
        found = []
        for step in range(num_steps):
            pending = [
                comm.launch_all_reduce(b, replica, memory[replica][b].fill_(step * 100 + b * 10 + replica))
                for b in range(num_buckets)
            ]
            sums = [comm.wait_all_reduce(b, replica, pending[b]) for b in range(num_buckets)]
            found.append([value for total in sums for value in (float(total.min()), float(total.max()))])
            step_ends.wait(timeout=PATIENT)  # as every step of the executor ends on all devices
        return found

    expected = [
        [float(3 * (step * 100 + b * 10) + 3) for b in range(num_buckets) for _ in range(2)]
        for step in range(num_steps)
    ]
    assert on_threads(num_replicas, job) == [expected] * num_replicas


@pytest.mark.parametrize("missing", [0, 2])
@pytest.mark.parametrize("link", LINKS)
def test_a_missing_replica_is_named_when_time_is_up(link: str, missing: int) -> None:
    comm = communicator(link, 3, IMPATIENT)

    def job(replica: int) -> Any:
        if replica == missing:
            return None
        return comm.wait_all_reduce(0, replica, comm.launch_all_reduce(0, replica, torch.ones(8)))

    present = [r for r in range(3) if r != missing]
    for replica, error in enumerate(on_threads(3, job)):
        if replica != missing:
            assert isinstance(error, CommunicationError), error
            text = str(error)
            assert text.startswith(f"cpu:{replica} waited 0.05 s in all_reduce of bucket 0 for cpu:{missing}:")
            assert "raise timeout_seconds" in text and not any(f"for cpu:{p}" in text for p in present)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("link", LINKS)
def test_an_abort_wakes_those_who_wait(link: str, collective: str) -> None:
    comm = communicator(link, 3)
    launched = [threading.Event(), threading.Event()]

    def job(replica: int) -> Any:
        if replica == 0:  # fails in place of launching
            assert all(event.wait(PATIENT) for event in launched)
            return comm.abort()
        if collective == "all_reduce":
            pending = comm.launch_all_reduce(0, replica, torch.ones(8))
            launched[replica - 1].set()
            return comm.wait_all_reduce(0, replica, pending)
        pending = comm.launch_broadcast(0, replica, 0, torch.ones(8))
        launched[replica - 1].set()
        return comm.wait_broadcast(0, replica, 0, pending)

    _, *others = on_threads(3, job)
    assert [type(error) for error in others] == [Aborted, Aborted]


@pytest.mark.parametrize("link", LINKS)
def test_a_communicator_that_is_prepared_anew_works_after_an_abort(link: str) -> None:
    comm = communicator(link, 2)
    comm.launch_all_reduce(0, 0, torch.ones(8))
    comm.abort()
    comm.prepare([("all_reduce", 0)])
    job = lambda r: comm.wait_all_reduce(0, r, comm.launch_all_reduce(0, r, torch.ones(8))).clone()  # noqa: E731
    for found in on_threads(2, job):
        assert torch.equal(found, torch.full((8,), 2.0))


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("link", LINKS)
def test_a_broadcast_gives_the_roots_tensor(link: str, root: int) -> None:
    comm = communicator(link, 3)

    def job(replica: int) -> torch.Tensor:
        own = torch.full((5,), float(replica))
        return comm.wait_broadcast(0, replica, root, comm.launch_broadcast(0, replica, root, own)).clone()

    for found in on_threads(3, job):
        assert torch.equal(found, torch.full((5,), float(root)))


@pytest.mark.parametrize("link", LINKS)
def test_a_broadcast_whose_root_is_missing_names_it(link: str) -> None:
    comm = communicator(link, 2, IMPATIENT)
    pending = comm.launch_broadcast(0, 1, 0, torch.zeros(1))
    with pytest.raises(CommunicationError, match=r"cpu:1 waited 0.05 s in broadcast of bucket 0 for cpu:0:"):
        comm.wait_broadcast(0, 1, 0, pending)


def test_a_broadcast_names_its_root_and_nobody_else_when_time_is_up() -> None:
    comm = communicator("copy", 3, IMPATIENT)
    pending = comm.launch_broadcast(0, 1, 0, torch.zeros(1))
    with pytest.raises(CommunicationError) as caught:
        comm.wait_broadcast(0, 1, 0, pending)
    assert "for cpu:0:" in str(caught.value) and "cpu:2" not in str(caught.value)


def test_communicators_by_link() -> None:
    assert isinstance(communicator("shared-memory", 2), SharedMemoryCommunicator)
    assert isinstance(communicator("copy", 2), CopyCommunicator)


def test_copies_leave_the_replicas_buckets_alone() -> None:
    comm, buckets = communicator("copy", 2), [torch.ones(4), torch.full((4,), 2.0)]
    on_threads(2, lambda r: comm.wait_all_reduce(0, r, comm.launch_all_reduce(0, r, buckets[r])))
    assert torch.equal(buckets[0], torch.ones(4)) and torch.equal(buckets[1], torch.full((4,), 2.0))


@pytest.mark.parametrize("size", [128, 1000, 4097])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("link", LINKS)
def test_a_reduce_scatter_gives_each_replica_its_share_of_the_same_sum(link: str, num_replicas: int, size: int) -> None:
    torch.manual_seed(size)
    buckets = [torch.randn(size) for _ in range(num_replicas)]
    expected = functools.reduce(torch.add, [bucket.clone() for bucket in buckets])
    comm = communicator(link, num_replicas)

    def job(replica: int) -> torch.Tensor:
        return comm.wait_reduce_scatter(0, replica, comm.launch_reduce_scatter(0, replica, buckets[replica])).clone()

    assert torch.equal(torch.cat(on_threads(num_replicas, job)), expected)
