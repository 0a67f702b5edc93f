"""Ends failed calls."""

from __future__ import annotations

from collections.abc import Callable

from mirrorc.cluster import Cluster
from mirrorc.cluster.lost_in_rounds import in_short
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication import StepStoppedError
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState, Failure
from mirrorc.runtime.workers.team.consequences import (
    CONSEQUENCES,
    Event,
    Next,
    Parameters,
    Tells,
    may_have_parted,
)
from mirrorc.runtime.workers.team.published_failures import PublishedFailures
from mirrorc.runtime.workers.team.step_watcher import StepWatcher
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import LostConnectionError


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
                CommunicationError,
                "MC6202: these workers can make no further call",
                self._why_over,
                Next.RESTART.value,
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
