"""How workers wait for one another in a store, when that stops to answer while they wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorc.runtime.workers import opening
from mirrorc.runtime.workers.lane import LostConnectionError
from mirrorc.runtime.workers.opening import all_texts, await_all

_CLUSTER: Any = SimpleNamespace(rank=0, num_workers=2)
_WATCHER: Any = SimpleNamespace(beats=dict)


class StoppingStore:
    """A store whose host is stopped after some looks: it stays connected, and answers nothing for long."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers, self._goes_on = num_answers, threading.Event()

    def set(self, key: str, value: str) -> None:
        """Answers, until the host is stopped."""
        self._answer()

    def check(self, keys: list[str]) -> bool:
        """Whether a worker has come: the other one does not."""
        self._answer()
        return keys[0].endswith("0")

    def _answer(self) -> None:
        self._num_answers -= 1
        if self._num_answers < 0:
            self._goes_on.wait(60)


@pytest.mark.parametrize("num_answers", [0, 1, 2, 5])
@pytest.mark.parametrize("wait", ["for calls", "for texts"])
def test_a_store_that_stops_while_workers_wait_in_it_is_lost(
    wait: str, num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_LONGEST_ANSWER_SECONDS", 0.2)
    store, never = StoppingStore(num_answers), lambda: False
    with pytest.raises(LostConnectionError, match="store does not answer: no answer within"):
        if wait == "for calls":
            await_all(store, _WATCHER, _CLUSTER, 30.0, never)
        else:
            all_texts(store, _CLUSTER, "own", 30.0, never)
    store._goes_on.set()
