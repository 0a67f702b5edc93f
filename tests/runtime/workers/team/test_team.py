"""What a worker does when it hears that another one has failed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirrorc.runtime.workers.protocol.call_state import CallState, Failure
from mirrorc.runtime.workers.team.failed_calls import FailedCalls
from mirrorc.runtime.workers.team.step_watcher import PublishedFailures
from mirrorc.runtime.workers.team.team import Team
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import LostConnectionError, PayloadError


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
    team._failures = PublishedFailures(cluster, team._call)
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


class FakeWatcher:
    def __init__(self) -> None:
        self.published: list[str] = []

    def publish(self, failure: Failure) -> None:
        self.published.append(failure.text)


@pytest.mark.parametrize("seen_first", ["the cut connection", "the cause", "Ctrl-C"])
def test_a_failed_payload_is_published_before_the_cut_and_raised_whatever_is_seen_first(seen_first: str) -> None:
    cluster: Any = SimpleNamespace(workers=["worker 0", "worker 1"], rank=0)
    watcher, cause = FakeWatcher(), PayloadError("compression=Half() failed in exchange(): ValueError: the code")
    call = CallState(number=3)
    connections = Connections(None, cluster, 1.0, torch.device("cpu"))
    failed = FailedCalls(cluster, call, connections, PublishedFailures(cluster, call), watcher)  # type: ignore[arg-type]
    failed.publish_cause(cause)
    assert watcher.published == [f"it raised PayloadError: {cause}"], "before any connection is cut"
    seen = {"the cut connection": LostConnectionError("closed"), "the cause": cause, "Ctrl-C": KeyboardInterrupt()}
    raised = failed.explain(seen[seen_first], lambda: True, lambda: "")
    assert raised is (seen["Ctrl-C"] if seen_first == "Ctrl-C" else cause)
    assert len(watcher.published) == 1, "once"
    call.begin()
    other = ValueError("of the next call")
    assert failed.explain(other, lambda: True, lambda: "") is other and len(watcher.published) == 2
