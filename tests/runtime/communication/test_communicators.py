import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mirrorc.errors import CommunicationError
from mirrorc.ir.devices import Device, parse_devices
from mirrorc.ir.routes import Route
from mirrorc.runtime.communication import (
    Aborted,
    Communicator,
    CopyCommunicator,
    SharedMemoryCommunicator,
    communicator_for,
    nccl,
)
from mirrorc.runtime.devices.events import wait_device
from mirrorc.runtime.state.shares.pieces import CACHED_ELEMENTS, Visit

LINKS = ("shared-memory", "copy")
KINDS = ("all_reduce", "reduce_scatter")
PATIENT, IMPATIENT = 60.0, 0.05  # seconds; the latter only where nobody will come


def communicator(link: str, num_replicas: int, timeout_seconds: float = PATIENT, num_buckets: int = 1) -> Communicator:
    made = communicator_for(link, parse_devices([f"cpu:{i}" for i in range(num_replicas)]), timeout_seconds)
    ends = list(itertools.permutations(range(num_replicas), 2))
    made.prepare(
        [(kind, bucket) for kind in KINDS for bucket in range(num_buckets)],
        [Route(bucket, *pair) for bucket in range(num_buckets) for pair in ends],
    )
    return made


def on_threads(num_replicas: int, job: Callable[[int], Any]) -> list[Any]:
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
            step_ends.wait(timeout=PATIENT)  # every step of the executor ends on all devices, too
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
            assert text.startswith(f"MC5007: cpu:{replica} waited 0.05 s in all_reduce of bucket 0 for cpu:{missing}\n")
            assert "mirrorc.Communication(timeout=" in text and not any(f"for cpu:{p}" in text for p in present)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "send"])
@pytest.mark.parametrize("link", LINKS)
def test_an_abort_wakes_those_who_wait(link: str, collective: str) -> None:
    comm = communicator(link, 3)
    launched = [threading.Event(), threading.Event()]

    def job(replica: int) -> Any:
        if replica == 0:  # fails in place of launching
            assert all(event.wait(PATIENT) for event in launched)
            return comm.abort()
        if collective == "send":
            launched[replica - 1].set()
            return comm.receive(Route(0, 0, replica))
        launch, wait = (getattr(comm, f"{verb}_{collective}") for verb in ("launch", "wait"))
        pending = launch(0, replica, torch.ones(8))
        launched[replica - 1].set()
        return wait(0, replica, pending)

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


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("link", LINKS)
def test_those_who_are_sent_a_tensor_receive_it(link: str, source: int) -> None:
    comm = communicator(link, 3)

    def job(replica: int) -> torch.Tensor:
        if replica != source:
            return comm.receive(Route(0, source, replica)).clone()
        own = torch.full((5,), float(source))
        for destination in {0, 1, 2} - {source}:
            comm.send(Route(0, source, destination), own)
        return own

    for found in on_threads(3, job):
        assert torch.equal(found, torch.full((5,), float(source)))


@pytest.mark.parametrize("link", LINKS)
def test_sends_never_block_and_may_be_received_in_another_order(link: str) -> None:
    comm = communicator(link, 2, num_buckets=3)
    for bucket in (2, 0, 1):  # from this thread: nobody receives yet
        comm.send(Route(bucket, 0, 1), torch.full((4,), float(bucket)))
    found = [float(comm.receive(Route(bucket, 0, 1)).sum()) for bucket in (1, 2, 0)]
    assert found == [4.0, 8.0, 0.0]


@pytest.mark.parametrize("link", LINKS)
def test_what_is_sent_to_one_replica_does_not_wake_another(link: str) -> None:
    comm = communicator(link, 3, IMPATIENT)
    comm.send(Route(0, 0, 1), torch.ones(4))
    with pytest.raises(CommunicationError, match=r"cpu:2 waited 0.05 s in send of bucket 0 for cpu:0\n"):
        comm.receive(Route(0, 0, 2))
    assert torch.equal(comm.receive(Route(0, 0, 1)), torch.ones(4))


@pytest.mark.parametrize("link", LINKS)
def test_steps_send_anew_what_has_changed(link: str) -> None:
    comm, own = communicator(link, 2), torch.zeros(4)
    step_ends = threading.Barrier(2)

    def job(replica: int) -> list[float]:
        found = []
        for step in range(20):
            if replica == 0:
                comm.send(Route(0, 0, 1), own.fill_(step))
            else:
                found.append(float(comm.receive(Route(0, 0, 1)).max()))
            step_ends.wait(timeout=PATIENT)  # every step of the executor ends on all devices, too
        return found

    assert on_threads(2, job)[1] == [float(step) for step in range(20)]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("link", LINKS)
def test_a_receipt_whose_sender_is_missing_names_it_and_nobody_else(link: str, num_replicas: int) -> None:
    comm = communicator(link, num_replicas, IMPATIENT)
    with pytest.raises(CommunicationError, match=r"cpu:1 waited 0.05 s in send of bucket 0 for cpu:0\n") as caught:
        comm.receive(Route(0, 0, 1))
    assert "cpu:2" not in str(caught.value)


@pytest.mark.parametrize("link", LINKS)
def test_sends_of_one_bucket_are_told_apart_by_chunk_round_and_replicas(link: str) -> None:
    comm = communicator(link, 3)
    routes = [Route(0, *ends, chunk, number) for ends in ((0, 1), (2, 1)) for chunk in (0, 1) for number in (0, 1)]
    comm.prepare([], routes)
    for value, route in enumerate(routes):
        comm.send(route, torch.full((2,), float(value)))
    assert [float(comm.receive(route)[0]) for route in reversed(routes)] == list(map(float, reversed(range(8))))
    assert str(Route(3, 0, 1, chunk=2, round=1)) == "bucket 3, chunk 2, round 1" and str(Route(3, 0, 1)) == "bucket 3"


@pytest.mark.parametrize("link", LINKS)
def test_what_a_failed_step_has_sent_is_not_received_in_the_next(link: str) -> None:
    comm = communicator(link, 2)
    comm.send(Route(0, 0, 1), torch.zeros(2))
    comm.begin_afresh()
    comm.send(Route(0, 0, 1), torch.ones(2))
    assert torch.equal(comm.receive(Route(0, 0, 1)), torch.ones(2))


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


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_each_part_of_a_share_is_visited_once_and_may_be_written(link: str) -> None:
    size = 3 * CACHED_ELEMENTS
    buckets = [torch.arange(size, dtype=torch.float32), torch.ones(size)]
    comm, visited = communicator(link, 2), [[], []]

    def job(replica: int) -> torch.Tensor:
        def visit(part: torch.Tensor) -> None:
            visited[replica].append(part.clone())  # type: ignore[attr-defined]
            part.neg_()

        pending = comm.launch_reduce_scatter(0, replica, buckets[replica])
        return comm.wait_and_visit(0, replica, pending, Visit(visit, writes=True)).clone()

    shares = on_threads(2, job)
    assert torch.equal(torch.cat(shares), -torch.arange(1.0, size + 1.0))
    assert torch.equal(torch.cat([*visited[0], *visited[1]]), torch.arange(1.0, size + 1.0))


def test_only_gpus_are_waited_for_and_a_broken_one_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert all(wait_device(device, PATIENT) for device in (torch.device("cpu"), torch.device("cuda", 1)))
    assert asked == [torch.device("cuda", 1)]


def test_a_gpu_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    comes = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: comes.wait(PATIENT))
    assert not wait_device(torch.device("cuda", 0), IMPATIENT)
    comes.set()
    assert wait_device(torch.device("cuda", 0), PATIENT)


class RecordedStream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> None:
        pass


def test_two_steps_never_launch_nccl_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps NCCL's communicators in one map for the process, without a guard."""
    both, overlaps = threading.Barrier(2), []

    def all_reduce(tensors: Any, **_: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # nobody else is here
            both.wait(IMPATIENT)
            overlaps.append(tensors)

    monkeypatch.setattr(torch.cuda, "Stream", RecordedStream)
    monkeypatch.setattr(nccl.nccl, "all_reduce", all_reduce)
    made = [nccl.NcclCommunicator([Device("cuda:0", torch.device("cuda", 0))], PATIENT) for _ in range(2)]
    for own in made:
        own.prepare([("all_reduce", 0)])
    assert on_threads(2, lambda i: made[i].launch_all_reduce(0, 0, torch.ones(2))) == [True, True]
    assert overlaps == []


def test_nccl_comes_before_backward_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", RecordedStream)
    gpus = [Device(f"cuda:{i}", torch.device("cuda", i)) for i in range(2)]
    made = nccl.NcclCommunicator(gpus, PATIENT)
    assert [(stream.device, stream.priority) for stream in made._streams] == [(gpu.torch_device, -1) for gpu in gpus]
