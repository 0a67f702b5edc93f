"""The table of what follows from a failure, by what a worker does."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorc.runtime.communication import StepStoppedError
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState, Failure
from mirrorc.runtime.workers.team.failed_calls import CONSEQUENCES, Event, FailedCalls, Next
from mirrorc.runtime.workers.transport.lane import LostConnectionError

# The next call (again, restore, restart), with * where a failure is published, and ! where it says that this worker cannot go on;
# then the parameters, as the error says: before, before here (and not everywhere), between, after.
TABLE = {
    "RAISED": {
        "before": "again*",
        "refused": "raised",
        "voting": "restart*!",
        "decided": "restart*!",
        "voting early": "restart*!",
        "updating": "restore*",
        "updated": "restart*!",
        "done": "raised",
    },
    "CLOSED": {
        "before": "restart*!",
        "refused": "raised",
        "voting": "restart*!",
        "decided": "restart*!",
        "voting early": "restart*!",
        "updating": "restart*!",
        "updated": "restart*!",
        "done": "raised",
    },
    "FAILED_BEFORE": {
        "before": "again, before",
        "refused": "raised",
        "voting": "again, before",
        "decided": "restart*!, after",
        "voting early": "again, before",
        "updating": "restore, between",
        "updated": "restart*!, after",
        "done": "restart*!, after",
    },
    "FAILED_EARLY": {
        "before": "again, before",
        "refused": "raised",
        "voting": "again, before",
        "decided": "again, after",
        "voting early": "restore, before here",
        "updating": "restore, between",
        "updated": "restore, after",
        "done": "restore, after",
    },
    "FAILED_LATE": {
        "before": "again, before",
        "refused": "raised",
        "voting": "restart*!, before here",
        "decided": "restart*!, after",
        "voting early": "restore, before here",
        "updating": "restore, between",
        "updated": "restart*!, after",
        "done": "restart*!, after",
    },
    "GONE": {
        "before": "restart, before",
        "refused": "raised",
        "voting": "restart, before here",
        "decided": "restart, after",
        "voting early": "restart, before here",
        "updating": "restart, between",
        "updated": "restart, after",
        "done": "restart, after",
    },
}
OTHERS = {  # a failure of another worker, by its event
    "FAILED_BEFORE": Failure(1, 4, "it raised X", stage=CallStage.BEFORE),
    "FAILED_EARLY": Failure(1, 4, "it raised X", stage=CallStage.UPDATING),
    "FAILED_LATE": Failure(1, 4, "it raised X", stage=CallStage.DECIDED),
    "GONE": Failure(1, 4, "it has ended", is_final=True),
}
TEXTS = {
    "before": "No parameter was changed.",
    "before here": "No parameter was changed here, but other workers may have updated some.",
    "between": "The update had begun: parameters are between those before and those after this step: bucket 0.",
    "after": "The update was made here: parameters are those after this step.",
}


class PublishedFailures:
    """Failures of other workers: published, or found in heartbeats."""

    def __init__(self, published: Failure | None, sought: Failure | None) -> None:
        self.present, self._sought = published, sought

    def is_any(self) -> bool:
        return self.present is not None

    def find_failed_worker(self, error: BaseException, watcher: object) -> Failure:
        assert self._sought is not None
        return self._sought

    def text(self, failure: Failure) -> str:
        return f"worker {failure.rank}: {failure.text}"


def outcome(
    stage: CallStage,
    error: BaseException,
    published: Failure | None = None,
    sought: Failure | None = None,
    told: list[Failure] | None = None,
) -> str:
    """A worker's call fails in this stage; its cell of the table. ``told`` receives what it publishes."""
    told = [] if told is None else told
    closed: list[bool] = []
    cluster, watcher = SimpleNamespace(rank=0), SimpleNamespace(publish=told.append)
    connections = SimpleNamespace(close=lambda: closed.append(True) or True)
    parts: Any = (cluster, CallState(4, stage), connections, PublishedFailures(published, sought), watcher)
    failed = FailedCalls(*parts)
    raised = failed.explain(error, lambda: True, lambda: "bucket 0")
    if not closed:
        assert raised is error and not told and not failed.are_final and not failed.have_parted
        return "raised"
    following = Next.RESTART if failed.are_final else Next.RESTORE if failed.have_parted else Next.AGAIN
    cell = following.name.lower() + "*" * len(told) + "!" * sum(failure.is_final for failure in told)
    if raised is error:
        return cell
    text = str(raised)
    assert text.startswith("MC6201: training call 4 has failed\n  why:  worker ") and text.endswith(
        f"\n  fix:  {following.value}"
    )
    (state,) = (state for state, said in TEXTS.items() if f"  now:  {said.removesuffix('.')}\n" in text)
    return f"{cell}, {state}"


def test_rows_cover_all_pairs() -> None:
    assert all(set(CONSEQUENCES[event]) == set(CallStage) for event in Event)
    assert set(TABLE) == {event.name for event in Event} - {"LOST"} and all(
        set(row) == set(CallStage) for row in TABLE.values()
    )


@pytest.mark.parametrize("event", TABLE)
def test_each_row(event: str) -> None:
    own: dict[str, BaseException] = {"RAISED": KeyboardInterrupt(), "CLOSED": StepStoppedError("closed")}
    error = own.get(event, LostConnectionError("the connection broke"))
    assert {stage: outcome(stage, error, OTHERS.get(event)) for stage in CallStage} == TABLE[event]


@pytest.mark.parametrize("event", OTHERS)
def test_a_lost_connection_has_the_consequences_of_the_failure_behind_it(event: str) -> None:
    lost = LostConnectionError("the connection broke")
    assert {stage: outcome(stage, lost, sought=OTHERS[event]) for stage in CallStage} == TABLE[event]


def test_the_stage_of_the_others_says_what_they_may_have_done() -> None:
    events = {stage: Event.of(Failure(1, 4, "", stage=stage)).name for stage in CallStage}
    assert events == {
        "before": "FAILED_BEFORE",
        "refused": "FAILED_BEFORE",
        "voting": "FAILED_LATE",
        "decided": "FAILED_LATE",
        "voting early": "FAILED_EARLY",
        "updating": "FAILED_EARLY",
        "updated": "FAILED_LATE",
        "done": "FAILED_LATE",
    }
    assert {Event.of(Failure(1, 4, "", True, stage)) for stage in CallStage} == {Event.GONE}


@pytest.mark.parametrize(("stage", "other"), list(itertools.product(CallStage, CallStage)))
def test_where_one_worker_must_restart_all_must(stage: CallStage, other: CallStage) -> None:
    told: list[Failure] = []
    if stage in (CallStage.REFUSED, CallStage.DONE) or other is CallStage.REFUSED:
        return
    first = outcome(stage, ValueError("X"), told=told)
    second = outcome(other, LostConnectionError("the connection broke"), told[0])
    assert first.startswith("restart") <= second.startswith("restart"), (first, second)


def test_a_published_failure_survives_its_text() -> None:
    for stage in CallStage:
        failure = Failure(1, 4, 'it raised "X"', True, stage)
        assert Failure.from_text(failure.to_text()) == failure and Failure.from_text(failure.to_text()).stage is stage
