"""Groups of gloo that are registered nowhere, here between two threads of this process."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed

from mirrorc.torch_internals import GlooGroup
from mirrorc.torch_internals.distributed import process_groups


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
