"""What workers tell each other in a store, where one of them does not come any more."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import Worker
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState
from mirrorc.runtime.workers.team.control_messages import ControlCollectives
from mirrorc.runtime.workers.transport.lane import LostConnectionError


@pytest.mark.parametrize(("is_known", "is_broken"), [(True, False), (False, True)])
def test_a_worker_that_is_gone_is_not_waited_for_to_tell_a_difference(is_known: bool, is_broken: bool) -> None:
    cluster: Any = SimpleNamespace(rank=0, workers=[Worker(rank, 2, "host", 1, {}) for rank in range(2)])
    connections: Any = SimpleNamespace(part_of_store=lambda name: distributed.HashStore(), are_broken=is_broken)
    failures: Any = SimpleNamespace(is_any=lambda: is_known)
    call = CallState(stage=CallStage.REFUSED)
    control = ControlCollectives(cluster, 600.0, call, connections, failures)
    with pytest.raises(LostConnectionError, match="a worker is gone, or has failed"):
        control.refuse_difference("their variables", {"a": "1"}, "")
    assert call.stage is CallStage.BEFORE, "who is behind it is found out, as they do not raise the like"


def test_a_store_that_is_lost_before_a_difference_is_told_ends_the_call_as_a_lost_connection() -> None:
    def lost(name: str) -> Any:
        raise LostConnectionError("the workers' store does not answer")

    cluster: Any = SimpleNamespace(rank=0, workers=[Worker(rank, 2, "host", 1, {}) for rank in range(2)])
    failures: Any = SimpleNamespace(is_any=lambda: False)
    connections: Any = SimpleNamespace(part_of_store=lost, are_broken=False)
    call = CallState()
    with pytest.raises(LostConnectionError):
        ControlCollectives(cluster, 600.0, call, connections, failures).refuse_difference(
            "their variables", {"a": "1"}, ""
        )
    assert call.stage is CallStage.BEFORE
