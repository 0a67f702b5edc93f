"""The consequences of a failure in a training call."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mirrorc.runtime.workers.protocol.call_state import CallStage, Failure


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
_FAILED_EARLY = {  # nobody has ended the call, so all know of the failure
    CallStage.BEFORE:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    CallStage.REFUSED:      Consequence(Next.RAISE),
    CallStage.VOTING:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    CallStage.DECIDED:      Consequence(Next.AGAIN,   Parameters.AFTER),  # of a skipped step
    CallStage.VOTING_EARLY: Consequence(Next.RESTORE, Parameters.BEFORE_HERE),
    CallStage.UPDATING:     Consequence(Next.RESTORE, Parameters.BETWEEN),
    CallStage.UPDATED:      Consequence(Next.RESTORE, Parameters.AFTER),
    CallStage.DONE:         Consequence(Next.RESTORE, Parameters.AFTER),
}
_FAILED_LATE = {
    CallStage.BEFORE:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    CallStage.REFUSED:      Consequence(Next.RAISE),
    CallStage.VOTING:       Consequence(Next.RESTART, Parameters.BEFORE_HERE, Tells.END, _IS_UNKNOWN),
    CallStage.DECIDED:      Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    CallStage.VOTING_EARLY: Consequence(Next.RESTORE, Parameters.BEFORE_HERE),
    CallStage.UPDATING:     Consequence(Next.RESTORE, Parameters.BETWEEN),
    CallStage.UPDATED:      Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    CallStage.DONE:         Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
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
