"""The consequences of a failure in a training call, as a table."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mirrorc.runtime.workers.protocol.call_state import Failure, Stage


class Event(enum.Enum):
    """Events that end a call of this worker."""

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
        if failure.stage in (Stage.VOTING_EARLY, Stage.UPDATING):
            return Event.FAILED_EARLY
        return Event.FAILED_BEFORE if failure.stage in (Stage.BEFORE, Stage.REFUSED) else Event.FAILED_LATE


class Next(enum.Enum):
    RAISE = "the error is raised as it is; the connections stay"
    FIND = "heartbeats name the failed worker, whose failure is published and counts instead"
    AGAIN = "The step may be called again, on all workers"
    RESTORE = "Load a checkpoint into model and optimizer on all workers, and call the step again"
    RESTART = "End all workers, and start them again from a checkpoint"


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
    FAILURE = enum.auto()  # its error, unless they know a failure of this call
    END = enum.auto()  # that it cannot go on


@dataclass(frozen=True)
class Consequence:
    """A row of the table.

    Attributes:
        reason: for a restart; empty if that is the failure itself.
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
    Stage.BEFORE:       Consequence(Next.AGAIN,   tells=Tells.FAILURE),
    Stage.REFUSED:      Consequence(Next.RAISE),
    Stage.VOTING:       Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    Stage.COMMITTED:    Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    Stage.VOTING_EARLY: Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    Stage.UPDATING:     Consequence(Next.RESTORE, tells=Tells.FAILURE),
    Stage.UPDATED:      Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_HAS_VOTED),
    Stage.DONE:         Consequence(Next.RAISE),
}
_CLOSED = _RAISED | {
    Stage.BEFORE:       Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_IS_CLOSED),
    Stage.UPDATING:     Consequence(Next.RESTART, tells=Tells.FAILURE, reason=_IS_CLOSED),
}
_LOST = dict.fromkeys(Stage, Consequence(Next.FIND)) | {Stage.REFUSED: Consequence(Next.RAISE)}
_FAILED_BEFORE = {  # nobody commits a step without all votes; COMMITTED: all have decided against it, and some hear why
    Stage.BEFORE:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    Stage.REFUSED:      Consequence(Next.RAISE),
    Stage.VOTING:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    Stage.COMMITTED:    Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    Stage.VOTING_EARLY: Consequence(Next.AGAIN,   Parameters.BEFORE),
    Stage.UPDATING:     Consequence(Next.RESTORE, Parameters.BETWEEN),
    Stage.UPDATED:      Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    Stage.DONE:         Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
}
_FAILED_EARLY = {  # nobody has ended the call, so all know of the failure
    Stage.BEFORE:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    Stage.REFUSED:      Consequence(Next.RAISE),
    Stage.VOTING:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    Stage.COMMITTED:    Consequence(Next.AGAIN,   Parameters.AFTER),  # of a skipped step
    Stage.VOTING_EARLY: Consequence(Next.RESTORE, Parameters.BEFORE_HERE),
    Stage.UPDATING:     Consequence(Next.RESTORE, Parameters.BETWEEN),
    Stage.UPDATED:      Consequence(Next.RESTORE, Parameters.AFTER),
    Stage.DONE:         Consequence(Next.RESTORE, Parameters.AFTER),
}
_FAILED_LATE = {
    Stage.BEFORE:       Consequence(Next.AGAIN,   Parameters.BEFORE),
    Stage.REFUSED:      Consequence(Next.RAISE),
    Stage.VOTING:       Consequence(Next.RESTART, Parameters.BEFORE, Tells.END, _IS_UNKNOWN),
    Stage.COMMITTED:    Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    Stage.VOTING_EARLY: Consequence(Next.RESTORE, Parameters.BEFORE_HERE),
    Stage.UPDATING:     Consequence(Next.RESTORE, Parameters.BETWEEN),
    Stage.UPDATED:      Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
    Stage.DONE:         Consequence(Next.RESTART, Parameters.AFTER, Tells.END),
}
_GONE = {
    Stage.BEFORE:       Consequence(Next.RESTART, Parameters.BEFORE),
    Stage.REFUSED:      Consequence(Next.RAISE),
    Stage.VOTING:       Consequence(Next.RESTART, Parameters.BEFORE, reason=_IS_UNKNOWN),
    Stage.COMMITTED:    Consequence(Next.RESTART, Parameters.AFTER),
    Stage.VOTING_EARLY: Consequence(Next.RESTART, Parameters.BEFORE_HERE),
    Stage.UPDATING:     Consequence(Next.RESTART, Parameters.BETWEEN),
    Stage.UPDATED:      Consequence(Next.RESTART, Parameters.AFTER),
    Stage.DONE:         Consequence(Next.RESTART, Parameters.AFTER),
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


def may_have_parted(stage: Stage, consequence: Consequence) -> bool:
    """True if workers may have parameters of two steps, so that a broadcast must precede the next step."""
    commits_early = stage in (Stage.VOTING_EARLY, Stage.UPDATING, Stage.UPDATED)
    return consequence.next is Next.RESTORE or (commits_early and consequence.next is Next.RESTART)
