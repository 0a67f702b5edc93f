"""Groups of gloo and of NCCL that are registered nowhere, and the sockets of a process."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from late_streams import LateEvent, LateGpu
from stand_in_nccl import CPU, nccl_on
from torch import distributed

from mirrorc.torch_internals import GlooGroup, NcclGroup
from mirrorc.torch_internals.distributed import process_groups
from mirrorc.torch_internals.distributed.process_groups import connections_since, is_any_closed, open_sockets


def opened(stores: Sequence[Any] = (), seconds: float = 60.0) -> list[GlooGroup]:
    stores = stores or [distributed.HashStore()] * 2
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(lambda rank: GlooGroup(stores[rank], rank, len(stores), seconds), range(len(stores))))


def test_collectives_of_a_group() -> None:
    groups = opened()
    given = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    turned = [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])]
    gathered = [[torch.empty(2) for _ in groups] for _ in groups]
    sent = [torch.tensor([5, 6]), torch.tensor([0, 0])]
    works = [group.all_gather(given[rank].clone(), gathered[rank]) for rank, group in enumerate(groups)]
    works += [group.all_reduce(value) for group, value in zip(groups, given, strict=True)]
    works += [group.all_reduce(value) for group, value in zip(groups, turned, strict=True)]
    works += [group.broadcast(value) for group, value in zip(groups, sent, strict=True)]
    for work in works:
        work.wait()
    assert [value.tolist() for value in given] == [[11.0, 22.0]] * 2
    assert [value.tolist() for value in turned] == [[4 + 1j]] * 2
    assert [[value.tolist() for value in own] for own in gathered] == [[[1.0, 2.0], [10.0, 20.0]]] * 2
    assert [value.tolist() for value in sent] == [[5, 6]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("is_patient", [True, False])
def test_a_patient_worker_waits_longer_than_the_timeout(is_patient: bool) -> None:
    groups = opened(seconds=0.5)
    gathered = [[torch.zeros(1) for _ in groups] for _ in groups]
    work = groups[0].all_gather(torch.ones(1), gathered[0], is_patient=is_patient)
    late = threading.Timer(1.0, lambda: groups[1].all_gather(torch.ones(1), gathered[1]))
    late.start()
    if is_patient:
        work.wait()
        assert gathered[0] == [torch.ones(1)] * 2
    else:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            work.wait()
    late.join()


@pytest.mark.slow
def test_a_group_that_is_cut_ends_what_runs_on_it() -> None:
    groups = opened()
    began = time.monotonic()
    work = groups[0].all_reduce(torch.ones(3))  # the other one never comes
    threading.Timer(0.2, groups[0].cut).start()
    with pytest.raises(RuntimeError, match=r"[Cc]onnection|closed|reset"):
        work.wait()
    assert time.monotonic() - began < 20
    groups[0].cut()


def test_a_closed_connection_is_seen_where_nothing_is_under_way() -> None:
    groups = opened()
    assert not any(group.is_broken for group in groups)
    groups[1].cut()
    assert groups[0].is_broken and not groups[1].is_broken


def test_a_group_connects_over_the_way_to_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    beneath = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = distributed.PrefixStore("a", distributed.PrefixStore("b", beneath))
    for group in opened([store, store.clone()]):
        assert group._connected or not process_groups.open_sockets()  # where the sockets of a process cannot be seen
    assert process_groups._is_loopback(store.get("address/0").decode())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        GlooGroup(distributed.HashStore(), 0, 1, 60.0)


@pytest.mark.parametrize(
    ("found", "places"),
    [
        (["127.0.1.1", "127.0.0.1"], ["127.0.1.1", "127.0.0.1"]),  # one machine
        (["127.0.1.1", "192.0.2.7", "192.0.2.9"], ["192.0.2.1", "192.0.2.7", "192.0.2.9"]),
        (["::1", "2001:db8::7"], ["192.0.2.1", "2001:db8::7"]),
        (["127.0.1.1", ""], ["127.0.1.1", None]),  # the other one has interfaces that are named
        (["", ""], [None, None]),
    ],
)
def test_the_machine_of_the_store_listens_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, found: list[str], places: list[str | None]
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = distributed.HashStore()
    for rank, address in enumerate(found):
        store.set(f"address/{rank}", address)
    for rank, place in enumerate(places):
        own = found[rank]
        monkeypatch.setattr(process_groups, "_address_towards", lambda host, own=own: own if not host else "192.0.2.1")
        assert process_groups._places(store, rank, len(found)) == ([{"hostname": place}] if place else [])


def test_an_address_on_the_way_to_a_host() -> None:
    assert process_groups._address_towards("127.0.0.1") == "127.0.0.1"
    assert process_groups._is_loopback(process_groups._address_towards("localhost"))
    assert process_groups._address_towards("no-such-host.invalid") == process_groups._address_towards("") == ""


needs_sockets = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the sockets of a process cannot be seen")


@needs_sockets
def test_new_connections_to_a_port_are_told_from_others_and_seen_when_they_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as old:
            before = open_sockets()
            with socket.create_connection(("127.0.0.1", port)) as new, socket.create_connection(other.getsockname()):
                found = connections_since(before, port)
                assert set(found) == {new.fileno()} and old.fileno() in before
                accepted = [listener.accept()[0] for _ in range(2)]
                assert not is_any_closed(found)
                accepted[1].close()
                assert is_any_closed(found)
                accepted[0].close()
            assert is_any_closed(found), "by this process"


@needs_sockets
def test_only_the_given_sockets_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sign of life asks, in a process that may have thousands of files open."""

    def refuse(*_: object) -> None:
        pytest.fail("all files of the process are listed")

    one, other = socket.socketpair()
    with one, other:
        given = {one.fileno(): open_sockets()[one.fileno()]}
        monkeypatch.setattr(os, "listdir", refuse)
        assert not is_any_closed(given)
        other.close()
        assert is_any_closed(given)


@needs_sockets
def test_a_number_that_another_file_has_got_is_a_closed_socket() -> None:
    with contextlib.ExitStack() as opened:
        one, _, third, _ = (
            opened.enter_context(each) for pair in (socket.socketpair(), socket.socketpair()) for each in pair
        )
        number, known = one.fileno(), open_sockets()
        given = {number: known[number]}
        os.dup2(third.fileno(), number)
        assert is_any_closed(given), "another socket"
        with open(os.devnull) as nowhere:
            os.dup2(nowhere.fileno(), number)
        assert is_any_closed(given), "no socket"


def opened_nccl(gpu: LateGpu, patch: pytest.MonkeyPatch, num_workers: int = 3) -> tuple[NcclGroup, Any]:
    """A group of one of the workers, and NCCL's group of torch in it."""
    kind: Any = nccl_on(gpu, num_workers)
    gpu.takes_the_place_of_cuda(patch)
    patch.setattr(torch.cuda, "Stream", lambda device, priority: gpu.new_stream())
    patch.setattr(torch.cuda, "Event", lambda blocking: LateEvent(gpu))
    patch.setattr(torch.distributed, "ProcessGroupNCCL", kind, raising=False)
    group = NcclGroup(None, 0, num_workers, CPU)
    return group, kind.made[-1]


@given(st.integers(0, 2**16), st.integers(1, 4))
@fuzzed(25)
def test_sums_are_of_what_was_queued_before_their_launch(seed: int, num_buckets: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu = LateGpu(seed)
        group, _ = opened_nccl(gpu, patch)
        buckets, works = [torch.full((2,), torch.nan) for _ in range(num_buckets)], []
        for i, bucket in enumerate(buckets):
            gpu.queue(lambda i=i, bucket=bucket: bucket.fill_(i + 1.0))  # type: ignore[misc]
            works.append(group.all_reduce(bucket))
        assert all(bucket.isnan().all() for bucket in buckets), "nothing has run yet, and the host has not waited"
        for i, work in enumerate(works):
            work.wait()
            assert buckets[i].tolist() == [3.0 * (i + 1)] * 2


def test_backward_goes_on_while_a_bucket_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    group, nccl = opened_nccl(gpu, monkeypatch)
    nccl.stream.is_held, done = True, []  # it sends for long
    work = group.all_reduce(torch.ones(2))
    gpu.queue(lambda: done.append("backward"))
    gpu.run_until(lambda: bool(done))
    nccl.stream.is_held = False
    work.wait()


def test_complex_numbers_are_added_as_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    group, _ = opened_nccl(gpu, monkeypatch)
    given = torch.tensor([1 + 2j])
    group.all_reduce(given).wait()
    assert given.tolist() == [3 + 6j]


def test_a_group_that_is_cut_gives_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    group, nccl = opened_nccl(gpu, monkeypatch)
    work = group.all_reduce(torch.ones(2))
    group.cut()
    group.cut()
    assert nccl.is_aborted.wait(60.0)
    with pytest.raises(RuntimeError, match="the connection to the other workers is closed"):
        work.wait()  # an aborted collective ends like any other


def test_a_group_is_cut_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    group, nccl = opened_nccl(LateGpu(0), monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", start)
    group.cut()
    assert nccl.is_aborted.is_set()


def test_torch_is_told_to_end_no_process_and_nothing_stays_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    seen: dict[str, str | None] = {}
    gpu = LateGpu(0)
    kind: Any = nccl_on(gpu, 2)
    names = [f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "RETHROW_CUDA_ERRORS")]

    class Noting(kind):
        def __init__(self, *args: Any) -> None:
            seen.update({name: os.environ.get(name) for name in names})
            super().__init__(*args)

    gpu.takes_the_place_of_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: gpu.new_stream())
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: LateEvent(gpu))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Noting, raising=False)
    NcclGroup(None, 0, 2, CPU)
    assert seen == dict.fromkeys(names, "0")
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1" and names[0] not in os.environ
    assert Noting.made[-1].options.is_high_priority_stream, "what sends comes before backward"


def test_a_build_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    with pytest.raises(RuntimeError, match="this build of torch has no NCCL"):
        NcclGroup(None, 0, 2, CPU)
