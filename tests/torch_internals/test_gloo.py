"""Groups of gloo that are registered nowhere, here between two threads of this process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from mirrorc.torch_internals import GlooGroup


def opened(num_workers: int = 2) -> list[GlooGroup]:
    store = distributed.HashStore()
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda rank: GlooGroup(store, rank, num_workers, 60.0), range(num_workers)))


def test_collectives_of_a_group() -> None:
    groups = opened()
    given = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    turned = [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])]
    gathered = [[torch.empty(2) for _ in groups] for _ in groups]
    sent = [torch.tensor([5, 6]), torch.tensor([0, 0])]
    for rank, group in enumerate(groups):
        group.all_gather(given[rank].clone(), gathered[rank])
    works = [group.all_reduce(value) for group, value in zip(groups, given, strict=True)]
    works += [group.all_reduce(value) for group, value in zip(groups, turned, strict=True)]
    works += [group.broadcast(value) for group, value in zip(groups, sent, strict=True)]
    for work in works:
        work.wait()
    assert [value.tolist() for value in given] == [[11.0, 22.0]] * 2
    assert [value.tolist() for value in turned] == [[4 + 1j]] * 2
    assert [[value.tolist() for value in own] for own in gathered] == [[[1.0, 2.0], [10.0, 20.0]]] * 2
    assert [value.tolist() for value in sent] == [[5, 6]] * 2


def test_a_group_that_is_cut_ends_what_runs_on_it() -> None:
    groups = opened()
    began = time.monotonic()
    work = groups[0].all_reduce(torch.ones(3))  # the other one never comes
    threading.Timer(0.2, groups[0].cut).start()
    with pytest.raises(RuntimeError, match=r"[Cc]onnection|closed|reset"):
        work.wait()
    assert time.monotonic() - began < 20
    groups[0].cut()
