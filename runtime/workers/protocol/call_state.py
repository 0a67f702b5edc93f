"""Stage of a worker in a training call, for the meaning of a failure."""

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
    """State of this worker's training calls, which come one at a time.

    Attributes:
        number: number of the last begun call; 0 before the first.
        stage: stage of that call.
        is_early: whether it commits before all sums are there.
        are_all_raising: whether all workers raise the same error, so that none needs to be notified.
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
        return self.stage is not Stage.BEFORE

    @property
    def is_before_end(self) -> bool:
        """Test for an early commit, done or pending, with an unsent loss. No worker ends the call without it."""
        return self.is_early and self.stage in (Stage.VOTING, Stage.UPDATING)
