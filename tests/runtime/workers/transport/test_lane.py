"""A lane whose collectives do not end."""

import threading

import pytest
import torch
from torch import distributed

from mirrorc.runtime.workers.transport import lane
from mirrorc.runtime.workers.transport.lane import Lane

_HOST = torch.device("cpu")


class Endless:
    """A group that waits for its works when it is let go, as those of torch do, and that cannot end them."""

    goes_on = threading.Event()
    was_let_go = threading.Event()

    def cut(self) -> None:
        pass

    def __del__(self) -> None:
        self.goes_on.wait(60)
        self.was_let_go.set()


def test_who_closes_a_lane_does_not_wait_without_a_bound_for_what_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "opened_group", lambda *_: Endless())
    monkeypatch.setattr(lane, "_LONGEST_CLOSING_SECONDS", 0.1)
    closed = Lane(distributed.HashStore(), 0, 2, 5.0, "of a test", _HOST)
    assert not closed.close() and closed.is_closed and not Endless.was_let_go.is_set()
    Endless.goes_on.set()
    assert Endless.was_let_go.wait(60)
    monkeypatch.setattr(lane, "_LONGEST_CLOSING_SECONDS", 60.0)
    assert closed.close(), "it may be closed again, when all has ended"
