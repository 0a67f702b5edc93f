"""The stage of a worker in a training call, and failures that end calls."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass


class CallStage(enum.StrEnum):
    """Stages of a training call.

    An early commit passes VOTING_EARLY, UPDATING and UPDATED. A call that all workers refuse ends in REFUSED.
    """

    BEFORE = "before"  # other workers have no vote of this worker
    REFUSED = "refused"  # all workers raise the same error
    VOTING = "voting"
    DECIDED = "decided"  # all workers have decided for the step or against it
    VOTING_EARLY = "voting early"
    UPDATING = "updating"  # the step takes place, and sums or updates are to come; no worker ends the call without them
    UPDATED = "updated"
    DONE = "done"  # this worker has sent all


@dataclass
class CallState:
    """This worker's current training call; ``number`` is 0 before the first."""

    number: int = 0
    stage: CallStage = CallStage.BEFORE

    def begin(self) -> None:
        self.number += 1
        self.stage = CallStage.BEFORE


@dataclass(frozen=True)
class Failure:
    """A failure that ends a call on all workers.

    Attributes:
        rank: of the failed worker; -1 if unknown.
        text: the cause, as a clause: "it raised ValueError: ...".
        is_final: the worker cannot continue, so all later calls fail, too.
        stage: of the publishing worker.
    """

    rank: int
    step: int
    text: str
    is_final: bool = False
    stage: CallStage = CallStage.BEFORE

    def ends(self, call: int) -> bool:
        return self.step == call or (self.is_final and self.step < call)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> Failure:
        fields = json.loads(text)
        return Failure(**{**fields, "stage": CallStage(fields["stage"])})
