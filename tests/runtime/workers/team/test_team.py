"""What a worker does when it hears that another one has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mirrorc.runtime.workers.protocol.call_state import CallState
from mirrorc.runtime.workers.team.failure_detector import Failure
from mirrorc.runtime.workers.team.failures import Failures
from mirrorc.runtime.workers.team.team import Team
from mirrorc.runtime.workers.transport.connections import Connections


class FakeLane:
    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True

    def close(self) -> bool:
        return True


def test_a_late_notice_cuts_the_connections_of_its_own_call_alone() -> None:
    own, next_ones = [FakeLane(), FakeLane()], [FakeLane(), FakeLane()]
    cluster: Any = SimpleNamespace(workers=[], rank=0)
    team = Team.__new__(Team)  # without the store and the watcher that it would begin with
    team._call = CallState(number=5)
    team._failures = Failures(cluster, team._call)
    team.connections = Connections(None, cluster, 1.0, torch.device("cpu"))
    team.connections._lanes += own  # type: ignore[arg-type]

    def meanwhile() -> None:
        """The failed call ends in the main thread, and the next one opens its connections."""
        team.connections.close()
        team._call.begin()
        team.connections._lanes += next_ones  # type: ignore[arg-type]

    team.stop_on_failure(meanwhile)
    team._notice(Failure(1, 5, "it raised X"))
    assert all(lane.is_cut for lane in own)
    assert not any(lane.is_cut for lane in next_ones)
