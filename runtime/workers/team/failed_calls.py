"""Ends failed calls: notifies the others, closes the connections, reports the state of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mirrorc.cluster import Cluster
from mirrorc.cluster.heartbeat import in_short
from mirrorc.errors import CommunicationError
from mirrorc.runtime.communication import StepStoppedError
from mirrorc.runtime.workers.protocol.call_state import CallState, Stage
from mirrorc.runtime.workers.team.failure_detector import Failure, Watcher
from mirrorc.runtime.workers.team.failures import Failures
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import LostConnectionError

_RESTART = "End all workers, and start them again from a checkpoint"
_RESTORE = "Load a checkpoint into model and optimizer on all workers, and call the step again"


class FailedCalls:
    """Consequences of a team's failed calls, seen from a single worker.

    Args:
        call: progress of this worker.
        watcher: publishes failures of this worker.

    Attributes:
        have_parted: whether a call has failed when some workers may have updated, and others not, or in part.
    """

    def __init__(
        self, cluster: Cluster, call: CallState, connections: Connections, failures: Failures, watcher: Watcher
    ) -> None:
        self._cluster, self._call, self._watcher = cluster, call, watcher
        self._connections, self._failures = connections, failures
        self.have_parted = False
        self._why_over = ""  # why no further step can be made
        self._cause: tuple[int, BaseException] | None = None  # the number of a call, and its published error

    @property
    def are_final(self) -> bool:
        """Test for a failure after which no step can run."""
        return bool(self._why_over)

    def refuse_if_final(self) -> None:
        """Refuses a call after a final failure.

        Raises:
            CommunicationError: says which failure.
        """
        if self._why_over:
            raise CommunicationError(f"no further step can be made by these workers: {self._why_over}. {_RESTART}")

    def explain(self, error: BaseException, is_whole: Callable[[], bool], torn: Callable[[], str]) -> BaseException:
        """The error to raise for a failed call; the other workers are notified.

        Args:
            error: the exception in it.
            is_whole: whether variables and optimizers are those of some step, asked after a failure behind the commit.
            torn: the buckets updated by the step, if it has failed after an early commit; else empty.
        """
        call = self._call
        if isinstance(error, LostConnectionError | StepStoppedError) and self._has_cause:
            assert self._cause is not None
            error = self._cause[1]
        was_stopped_here = isinstance(error, StepStoppedError) and not self._failures.is_any()
        is_local = was_stopped_here or not isinstance(error, LostConnectionError | StepStoppedError)
        if call.are_all_raising or (is_local and call.stage is Stage.DONE and is_whole()):
            return error  # all raise the like; or the step is made, here as on the others
        known = self._publish_failure(error) if is_local else self._find(error)
        self._close_connections()
        none_has_committed = call.stage is Stage.VOTING and not (known.had_voted or known.is_final)
        has_parted = call.is_early and not none_has_committed
        self.have_parted = self.have_parted or has_parted
        if is_local:
            return error
        remedy = (
            _RESTART if self._why_over else _RESTORE if has_parted else "The step may be called again, on all workers"
        )
        state = self._state_after(is_whole, torn, has_parted=has_parted)
        return CommunicationError(
            f"training call {call.number} has failed: {self._failures.text(known)}. {state} {remedy}."
        )

    @property
    def _has_cause(self) -> bool:
        return self._cause is not None and self._cause[0] == self._call.number

    def publish_cause(self, error: BaseException) -> None:
        """Publishes the cause of a failure in the running call, before connections are cut for it.

        `explain` raises it, even if a device of this worker finds the cut connection first.
        """
        self._cause = self._call.number, error
        if not self._failures.is_any():
            self._watcher.publish(self._failure(error))

    def _failure(self, error: BaseException) -> Failure:
        text = f"it raised {in_short(error)}"
        return Failure(
            self._cluster.rank, self._call.number, text, False, self._call.has_voted, self._call.is_before_end
        )

    def _publish_failure(self, error: BaseException) -> Failure:
        """Returns the failure that ends the call for all, maybe an earlier one of another worker."""
        call, was_known = self._call, self._failures.is_any()
        known = self._failure(error)
        is_published = was_known or self._has_cause
        if call.stage not in (Stage.BEFORE, Stage.UPDATING):
            self._why_over = "this worker's step has failed when it had told the others that it takes place"
        elif isinstance(error, StepStoppedError):
            self._why_over = "this worker's step was closed"
        if not is_published:
            self._watcher.publish(dataclasses.replace(known, is_final=self.are_final))
        elif self.are_final:
            self._tell_that_it_is_over()
        return known

    def _find(self, error: BaseException) -> Failure:
        """The failure of another worker. If it is final for this worker, too, that is published."""
        known = self._failures.present or self._failures.judge(error, self._watcher)
        self._why_over = self._why_over_after(known)
        if self.are_final and not known.is_final:
            self._tell_that_it_is_over()
        return known

    def _tell_that_it_is_over(self) -> None:
        text = f"it cannot go on: {self._why_over}"
        self._watcher.publish(Failure(self._cluster.rank, self._call.number, text, True, self._call.has_voted))

    def _why_over_after(self, known: Failure) -> str:
        """The reason that no further step can run; empty if it can."""
        has_ended_nowhere = self._call.is_before_end or known.before_end
        if self._call.stage is Stage.VOTING and (known.had_voted or known.is_final) and not has_ended_nowhere:
            return "a connection broke while they agreed on a step, and it is not known which of them have made it"
        is_over = known.is_final or (self._call.stage in (Stage.COMMITTED, Stage.DONE) and not has_ended_nowhere)
        return self._failures.text(known) if is_over else ""

    def _state_after(self, is_whole: Callable[[], bool], torn: Callable[[], str], *, has_parted: bool) -> str:
        if self._call.stage is Stage.UPDATING and (buckets := torn()):
            return f"It had committed: parameters are between those before and those after this step: {buckets}."
        if has_parted and self._call.is_before_end:
            return "No parameter was changed here, but other workers may have updated some."
        if self._call.stage is not Stage.COMMITTED:
            return "No parameter was changed."
        if is_whole():
            return "It had committed here: parameters are those after this step."
        return "It had committed: parameters may have been updated in part, so load a checkpoint."

    def _close_connections(self) -> None:
        if not self._connections.close():  # they may still write gradients
            self._why_over = self._why_over or "what was sent to the other workers does not end"
