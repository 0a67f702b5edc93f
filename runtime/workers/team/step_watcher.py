"""The failure detector of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.failure_detector import FailureDetector, Pace
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.stores import SEE_STORE, first_line
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.protocol.call_progress import Progress
from mirrorc.runtime.workers.protocol.call_state import Failure

_FEWEST_SECONDS_BETWEEN_BEATS = 0.2
_MOST_BEATS_PER_SECOND = 500.0  # of all workers together, at one store
_SILENT_SECONDS = 2.0  # after a connection broke, a worker silent for this long has ended, or hangs
_LONGEST_GAP_SECONDS = 0.5
_SECONDS_BETWEEN_SAMPLES = 1.0
_LONGEST_ANSWER_SECONDS = 3.0  # of the store
_SLACK_SECONDS = 1.0


def pace_of_steps(num_workers: int) -> Pace:
    """A worker counts as silent only after several missed heartbeats."""
    interval = max(_FEWEST_SECONDS_BETWEEN_BEATS, num_workers / _MOST_BEATS_PER_SECOND)
    return Pace(
        interval,
        silence=max(_SILENT_SECONDS, 3 * interval),
        longest_gap=max(_LONGEST_GAP_SECONDS, interval),
        sampling=_SECONDS_BETWEEN_SAMPLES,
    )


class StepWatcher:
    """Sends this worker's progress with heartbeats, and receives published failures.

    Args:
        on_failure: a method, weakly referenced. The detector's thread calls it with each published failure, in order.
            The failure names this worker if the others have given up on it.

    Raises:
        CommunicationError: the store does not answer.
    """

    def __init__(self, store: Any, workers: Sequence[Worker], rank: int, on_failure: Callable[[Failure], None]) -> None:
        self.local_progress = Progress()
        self._rank, self._on_failure = rank, weakref.WeakMethod(on_failure)
        try:
            self.detector = FailureDetector(store, len(workers), rank, pace_of_steps(len(workers)), self)
        except (RuntimeError, TimeoutError) as error:
            raise problem(
                CommunicationError,
                f"MC6204: {workers[rank]}: the workers' store does not answer",
                first_line(error),
                SEE_STORE,
            ) from error
        self.detector.start()

    def progress(self) -> str:
        return self.local_progress.to_text()

    def hear(self, message: str) -> None:
        failure = Failure.from_text(message)
        on_failure = self._on_failure()
        if on_failure is not None:
            on_failure(failure)
        if failure.is_final:
            self.detector.messages.gone.add(failure.rank)

    def publish(self, failure: Failure, silent: Collection[int] = ()) -> None:
        """Publishes a failure. Waits a bounded time until all but ``silent`` workers have read it. Raises nothing."""
        self.detector.messages.gone.update(silent)
        self.detector.publish(failure.to_text())

    def find_silent(self, is_known: Callable[[], bool]) -> list[int] | None:
        return self.detector.find_silent(is_known, _SLACK_SECONDS)

    def all_live(self, is_known: Callable[[], bool]) -> bool:
        """True if all other workers send heartbeats. Waits at most a few seconds, less if ``is_known`` reports a
        failure.
        """
        return self.find_silent(is_known) == []

    def progress_of_all(self) -> dict[int, Progress]:
        """The last known progress of workers, in bounded time."""
        try:
            beats = in_bounded_time(self.detector.beats.read, _LONGEST_ANSWER_SECONDS)
        except (RuntimeError, TimeoutError):
            beats = {}
        by_rank = {rank: Progress.from_text(beat.decode().partition(" ")[2]) for rank, beat in beats.items() if beat}
        return {**by_rank, self._rank: self.local_progress}

    def leave(self, failure: Failure) -> None:
        """Ends the heartbeats, and publishes the reason. Raises nothing."""
        self.detector.leave(failure.to_text())
