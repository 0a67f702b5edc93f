"""How far a worker is in a training call with the others, on which it depends what a failure means."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.Enum):
    """The stages of a training call, in their order."""

    BEFORE = enum.auto()  # the others know of no vote of this worker
    VOTING = enum.auto()
    UPDATING = enum.auto()  # the step takes place, and commits before all sums are there
    COMMITTED = enum.auto()
    DONE = enum.auto()  # this worker has told the others all


@dataclass
class CallState:
    """How far this worker is in the training calls of its team, of which it makes one at a time.

    Attributes:
        number: of the last call that has begun; 0 before the first.
        stage: of that call.
        is_early: whether it commits before all sums are there.
        are_all_raising: whether all workers raise the like, so that nobody needs to be told.
    """

    number: int = 0
    stage: Stage = Stage.BEFORE
    is_early: bool = False
    are_all_raising: bool = False

    def begin(self) -> None:
        """Begins the next call."""
        self.number += 1
        self.stage, self.is_early, self.are_all_raising = Stage.BEFORE, False, False

    @property
    def has_voted(self) -> bool:
        """Whether this worker has told the others that the step takes place, as far as it knows."""
        return self.stage is not Stage.BEFORE

    @property
    def is_before_end(self) -> bool:
        """Whether this worker has committed early, or is about to, and has not told its loss: no worker ends the call without."""
        return self.is_early and self.stage in (Stage.VOTING, Stage.UPDATING)
