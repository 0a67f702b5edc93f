"""The consequences of a failure in a training call, and the end of failed calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from mirrorc.cluster import Cluster
from mirrorc.cluster.lost_in_rounds import in_short
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication import StepStoppedError
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState, Failure
from mirrorc.runtime.workers.team.step_watcher import PublishedFailures, StepWatcher
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import LostConnectionError


class Event(enum.Enum):
    RAISED = "an error of this worker, or an interrupt"
    CLOSED = "this worker's step was closed in another thread"
    LOST = "a connection broke, or a worker is late, and no failure is published"
    FAILED_BEFORE = "another worker published a failure before its vote"
    FAILED_EARLY = "... between its vote for an early commit and the end of its updates"
    FAILED_LATE = "... after its vote, or after its updates"
    GONE = "another worker cannot go on"

    @staticmethod
    def of(failure: Failure) -> Event:
        if failure.is_final:
            return Event.GONE
        if failure.stage in (CallStage.VOTING_EARLY, CallStage.UPDATING):
            return Event.FAILED_EARLY
        return Event.FAILED_BEFORE if failure.stage in (CallStage.BEFORE, CallStage.REFUSED) else Event.FAILED_LATE


class Next(enum.Enum):
    RAISE = "the error is raised as it is; the connections stay"
    FIND = "heartbeats name the failed worker, whose failure is published and counts instead"
    AGAIN = "make the call again, on all workers"
    RESTORE = "load a checkpoint into model and optimizer on all workers, and go on"
    RESTART = "end all workers, and start them again from a checkpoint"


class Parameters(enum.Enum):
    """The state of this worker's parameters after a failed call."""

    UNSAID = enum.auto()  # the error itself says it
    BEFORE = enum.auto()
    BEFORE_HERE = enum.auto()  # other workers may have updated some
    BETWEEN = enum.auto()  # some buckets are updated, or none, as in BEFORE_HERE
    AFTER = enum.auto()  # all are updated, unless an update failed


class Tells(enum.Enum):
    """The failure that this worker publishes for all others."""

    NOTHING = enum.auto()
    FAILURE = enum.auto()  # its error, unless a failure of this call is published already
    END = enum.auto()  # the worker cannot continue


@dataclass(frozen=True)
class Consequence:
    """An entry of `CONSEQUENCES`.

    Attributes:
        reason: why the workers must restart; empty for the failure itself.
    """

    next: Next
    parameters: Parameters = Parameters.UNSAID
    tells: Tells = Tells.NOTHING
    reason: str = ""


_HAS_VOTED = "this worker's step has failed when it had told the others that it takes place"
_IS_CLOSED = "this worker's step was closed"
_IS_UNKNOWN = "a connection broke while they agreed on a step, and it is not known which of them have made it"

# fmt: off
_RAISED = {
    CallStage.BEFORE:       Consequence(Next.AGAIN,   tells=Tells.FAILURE),
    CallStage.REFUSED:      Consequence(Next.RAISE),
    CallStage.VOTING:       Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    CallStage.DECIDED:      Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    CallStage.VOTING_EARLY: Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    CallStage.UPDATING:     Consequence(Next.RESTORE, tells=Tells.FAILURE),
    CallStage.UPDATED:      Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    CallStage.DONE:         Consequence(Next.RAISE),
}
_CLOSED = _RAISED | {
    CallStage.BEFORE:       Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_IS_CLOSED),
    CallStage.UPDATING:     Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_IS_CLOSED),
}
_LOST = dict.fromkeys(CallStage, Consequence(Next.FIND)) | {CallStage.REFUSED: Consequence(Next.RAISE)}
_FAILED_BEFORE = {  # nobody commits a step without all votes; DECIDED: all have decided against it, and some hear why
    CallStage.BEFORE:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    CallStage.REFUSED:      Consequence(Next.RAISE),
    CallStage.VOTING:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    CallStage.DECIDED:      Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    CallStage.VOTING_EARLY: Consequence(Next.AGAIN,   Parameters.BEFORE),
    CallStage.UPDATING:     Consequence(Next.RESTORE, Parameters.BETWEEN),
    CallStage.UPDATED:      Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    CallStage.DONE:         Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
}
_FAILED_EARLY = _FAILED_BEFORE | {  # nobody has ended the call, so all know of the failure
    CallStage.DECIDED:      Consequence(Next.AGAIN,   Parameters.AFTER),  # of a skipped step
    CallStage.VOTING_EARLY: Consequence(Next.RESTORE, Parameters.BEFORE_HERE),
    CallStage.UPDATED:      Consequence(Next.RESTORE, Parameters.AFTER),
    CallStage.DONE:         Consequence(Next.RESTORE, Parameters.AFTER),
}
_FAILED_LATE = _FAILED_BEFORE | {
    CallStage.VOTING:       Consequence(Next.RESTART, Parameters.BEFORE_HERE, Tells.END, _IS_UNKNOWN),
    CallStage.VOTING_EARLY: Consequence(Next.RESTORE, Parameters.BEFORE_HERE),
}
_GONE = {
    CallStage.BEFORE:       Consequence(Next.RESTART, Parameters.BEFORE),
    CallStage.REFUSED:      Consequence(Next.RAISE),
    CallStage.VOTING:       Consequence(Next.RESTART, Parameters.BEFORE_HERE, reason=_IS_UNKNOWN),
    CallStage.DECIDED:      Consequence(Next.RESTART, Parameters.AFTER),
    CallStage.VOTING_EARLY: Consequence(Next.RESTART, Parameters.BEFORE_HERE),
    CallStage.UPDATING:     Consequence(Next.RESTART, Parameters.BETWEEN),
    CallStage.UPDATED:      Consequence(Next.RESTART, Parameters.AFTER),
    CallStage.DONE:         Consequence(Next.RESTART, Parameters.AFTER),
}
# fmt: on
CONSEQUENCES = {
    Event.RAISED: _RAISED,
    Event.CLOSED: _CLOSED,
    Event.LOST: _LOST,
    Event.FAILED_BEFORE: _FAILED_BEFORE,
    Event.FAILED_EARLY: _FAILED_EARLY,
    Event.FAILED_LATE: _FAILED_LATE,
    Event.GONE: _GONE,
}


def may_have_parted(stage: CallStage, consequence: Consequence) -> bool:
    commits_early = stage in (CallStage.VOTING_EARLY, CallStage.UPDATING, CallStage.UPDATED)
    return consequence.next is Next.RESTORE or (commits_early and consequence.next is Next.RESTART)


class FailedCalls:
    """Applies the `CONSEQUENCES` of failed calls; ``have_parted`` is as in `Team`."""

    def __init__(
        self,
        cluster: Cluster,
        call: CallState,
        connections: Connections,
        failures: PublishedFailures,
        watcher: StepWatcher,
    ) -> None:
        self._cluster, self._call, self._watcher = cluster, call, watcher
        self._connections, self._failures = connections, failures
        self.have_parted = False
        self._why_over = ""  # why no further step can be made
        self._cause: tuple[int, BaseException] | None = None  # the number of a call, and its published error

    @property
    def are_final(self) -> bool:
        return bool(self._why_over)

    def refuse_if_final(self) -> None:
        if self._why_over:
            raise problem(
                CommunicationError, "MC6202: these workers can make no further call", self._why_over, Next.RESTART.value
            )

    def explain(self, error: BaseException, is_whole: Callable[[], bool], torn: Callable[[], str]) -> BaseException:
        """Returns the error to raise for a failed call, and notifies the other workers.

        Args:
            is_whole: called after a vote; True if variables and optimizers are all of one step.
            torn: names the updated buckets, if the step failed after an early commit.
        """
        if isinstance(error, LostConnectionError | StepStoppedError):
            error = self._published_cause or error
        failure = self._failures.present
        event, stage = _event(error, failure), self._stage(is_whole)
        if CONSEQUENCES[event][stage].next is Next.FIND:
            failure = self._failures.find_failed_worker(error, self._watcher)
            event, stage = Event.of(failure), self._stage(is_whole)  # a device may have continued meanwhile
        consequence = CONSEQUENCES[event][stage]
        if consequence.next is Next.RAISE:
            return error
        if consequence.next is Next.RESTART:
            self._why_over = consequence.reason or self._failure_text(failure)
        self._publish(consequence.tells, error)
        if not self._connections.close():  # they may still write gradients
            self._why_over = self._why_over or "what was sent to the other workers does not end"
        self.have_parted = self.have_parted or may_have_parted(stage, consequence)
        if event in (Event.RAISED, Event.CLOSED):
            return error
        remedy = Next.RESTART if self._why_over else consequence.next
        state = _state_text(consequence.parameters, is_whole, torn)
        what = f"training call {self._call.number} has failed"
        return problem(CommunicationError, f"MC6201: {what}", self._failure_text(failure), remedy.value, now=state)

    def _failure_text(self, failure: Failure | None) -> str:
        assert failure is not None, "published by another worker, or sought"
        return self._failures.text(failure)

    def _stage(self, is_whole: Callable[[], bool]) -> CallStage:
        stage = self._call.stage
        return CallStage.DECIDED if stage is CallStage.DONE and not is_whole() else stage

    @property
    def _published_cause(self) -> BaseException | None:
        return self._cause[1] if self._cause is not None and self._cause[0] == self._call.number else None

    def publish_cause(self, error: BaseException) -> None:
        """Publishes an error before the connections are closed.

        `explain` then returns this error, even if a device notices the closed connection first.
        """
        self._cause = self._call.number, error
        if not self._failures.is_any():
            self._watcher.publish(self._failure(f"it raised {in_short(error)}", is_final=False))

    def _publish(self, tells: Tells, error: BaseException) -> None:
        is_known = self._failures.is_any() or self._published_cause is not None
        if tells is Tells.FAILURE and not is_known:
            self._watcher.publish(self._failure(f"it raised {in_short(error)}", is_final=self.are_final))
        elif tells is Tells.END or (tells is Tells.FAILURE and self.are_final):
            self._watcher.publish(self._failure(f"it cannot go on: {self._why_over}", is_final=True))

    def _failure(self, text: str, *, is_final: bool) -> Failure:
        return Failure(self._cluster.rank, self._call.number, text, is_final, self._call.stage)


def _event(error: BaseException, failure: Failure | None) -> Event:
    if isinstance(error, StepStoppedError) and failure is None:
        return Event.CLOSED
    if not isinstance(error, LostConnectionError | StepStoppedError):
        return Event.RAISED
    return Event.LOST if failure is None else Event.of(failure)


def _state_text(parameters: Parameters, is_whole: Callable[[], bool], torn: Callable[[], str]) -> str:
    if parameters is Parameters.BETWEEN and (buckets := torn()):
        return f"The update had begun: parameters are between those before and those after this step: {buckets}."
    if parameters in (Parameters.BETWEEN, Parameters.BEFORE_HERE):
        return "No parameter was changed here, but other workers may have updated some."
    if parameters is Parameters.BEFORE:
        return "No parameter was changed."
    if is_whole():
        return "The update was made here: parameters are those after this step."
    return "The update had begun: parameters may have been updated in part, so load a checkpoint."
