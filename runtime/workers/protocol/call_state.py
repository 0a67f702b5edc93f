"""The stage and the progress of a worker in its training calls, and failures that end calls."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_BEGUN, _MET, _READY, _ENDED = 0, 1, 2, 3


@dataclass(frozen=True, order=True)
class Progress:
    """A worker's progress in its training calls; later points compare as greater.

    Attributes:
        call: number of the call; 0 before the first.
    """

    call: int = 0
    stage: int = _ENDED
    num_buckets: int = 0

    def begun(self, call: int) -> Progress:
        return Progress(call, _BEGUN)

    def met(self) -> Progress:
        return Progress(self.call, _MET)

    def sent(self) -> Progress:
        return Progress(self.call, self.stage, self.num_buckets + 1)

    def ready(self) -> Progress:
        return Progress(self.call, _READY, self.num_buckets)

    def ended(self) -> Progress:
        return Progress(self.call, _ENDED, self.num_buckets)

    def to_text(self) -> str:
        return f"{self.call} {self.stage} {self.num_buckets}"

    @staticmethod
    def from_text(text: str) -> Progress:
        return Progress(*map(int, text.split()))

    def __str__(self) -> str:
        if self.stage == _BEGUN:
            return f"at the beginning of training call {self.call}"
        if self.stage == _ENDED:
            between = f"between training calls {self.call} and {self.call + 1}"
            return between if self.call else "before its first training call"
        buckets = f"{self.num_buckets} bucket{'s' * (self.num_buckets != 1)}"
        ready = ", ready to commit" if self.stage == _READY else ""
        return f"in training call {self.call}, with {buckets} sent{ready}"


def least_far(everyone: Mapping[int, Progress]) -> int | None:
    """The rank of the straggler; None if several workers are equally far behind."""
    least = min(everyone.values())
    behind = [rank for rank, progress in everyone.items() if progress == least]
    return behind[0] if len(behind) == 1 else None


class CallStage(enum.StrEnum):
    """An early commit passes VOTING_EARLY, UPDATING and UPDATED. A call that all workers refuse ends in REFUSED."""

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
