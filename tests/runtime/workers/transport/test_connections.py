"""How workers wait for one another in a store, when that stops to answer while they wait."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from mirrorc.runtime.workers.transport import connections
from mirrorc.runtime.workers.transport.connections import all_texts, await_all, open_lane
from mirrorc.runtime.workers.transport.lane import LostConnectionError

_CLUSTER: Any = SimpleNamespace(rank=0, num_workers=2, lookout=lambda: SimpleNamespace(gone=dict))


class StoppingStore:
    """A store whose host is stopped after some looks: it stays connected, and answers nothing for long."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers, self._goes_on = num_answers, threading.Event()

    def set(self, key: str, value: str) -> None:
        self._answer()

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return keys[0].endswith("0")

    def _answer(self) -> None:
        self._num_answers -= 1
        if self._num_answers < 0:
            self._goes_on.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("num_answers", [0, 1, 2, 5])
@pytest.mark.parametrize("wait", ["for calls", "for texts"])
def test_a_store_that_stops_while_workers_wait_in_it_is_lost(
    wait: str, num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "patience", lambda timeout_seconds: 0.2)
    store, never = StoppingStore(num_answers), lambda: False
    with pytest.raises(LostConnectionError, match="store does not answer: no answer within"):
        if wait == "for calls":
            await_all(store, _CLUSTER, 30.0, never)
        else:
            all_texts(store, _CLUSTER, "own", 30.0, never)
    store._goes_on.set()


class ComingStore:
    def __init__(self) -> None:
        self.set: Any = lambda key, value: None
        self.num_asked = 0

    def check(self, keys: list[str]) -> bool:
        return keys[0].endswith("0") or self.num_asked == 3

    def may_wait_on(self) -> bool:
        self.num_asked += 1
        return True


def test_who_may_wait_on_waits_as_often_as_that_is_so() -> None:
    store = ComingStore()
    await_all(store, _CLUSTER, 0.03, lambda: False, store.may_wait_on)
    assert store.num_asked == 3
    with pytest.raises(LostConnectionError, match="not all workers came to this call"):
        await_all(ComingStore(), _CLUSTER, 0.03, lambda: False)


@pytest.mark.slow
def test_a_worker_that_ends_while_connections_are_opened_is_not_waited_for_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = threading.Event()
    monkeypatch.setattr(connections, "Lane", lambda *_: never.wait(60))
    with pytest.raises(LostConnectionError, match="workers could not connect: no answer within"):
        open_lane("control", distributed.HashStore(), _CLUSTER, 0.2, torch.device("cpu"), lambda: False)
    never.set()


def test_who_opens_a_connection_waits_no_longer_when_another_worker_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    never, looks = threading.Event(), iter([False, False, True])
    monkeypatch.setattr(connections, "Lane", lambda *_: never.wait(60))
    with pytest.raises(LostConnectionError, match="workers could not connect: another worker has failed meanwhile"):
        open_lane("control", distributed.HashStore(), _CLUSTER, 30.0, torch.device("cpu"), lambda: next(looks))
    never.set()
