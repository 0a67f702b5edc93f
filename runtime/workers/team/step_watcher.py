"""The failure detector of a step, and failures that workers publish."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mirrorc.cluster import Cluster
from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.failure_detector import FailureDetector, Pace
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.stores import SEE_STORE, first_line
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import numbered
from mirrorc.runtime.workers.protocol.call_state import CallState, Failure, Progress, least_far

_FEWEST_SECONDS_BETWEEN_BEATS = 0.2
_MOST_BEATS_PER_SECOND = 500.0  # of all workers together, at one store
_SILENT_SECONDS = 2.0  # after a connection broke, a worker silent for this long has ended, or hangs
_LONGEST_GAP_SECONDS = 0.5
_SECONDS_BETWEEN_SAMPLES = 1.0
_LONGEST_ANSWER_SECONDS = 3.0  # of the store
_SLACK_SECONDS = 1.0
_OUTCOME = re.compile(
    r"(\. |\n  now:  )(No parameter was changed|The update had begun|The update was made).*", re.DOTALL
)


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
        """True if all others send heartbeats. Waits a few seconds, less if ``is_known`` reports a failure."""
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


class PublishedFailures:
    def __init__(self, cluster: Cluster, call: CallState) -> None:
        self._cluster, self._call = cluster, call
        self._published: list[Failure] = []  # by others, in their order

    def note(self, failure: Failure) -> None:
        """Runs in the detector's thread."""
        number = self._call.number
        current = [known for known in self._published if known.is_final or known.step >= number]
        self._published = [*current, failure]

    def ending(self, call: int) -> Failure | None:
        return next((failure for failure in self._published if failure.ends(call)), None)

    @property
    def present(self) -> Failure | None:
        return self.ending(self._call.number)

    def is_any(self) -> bool:
        return self.present is not None

    def find_failed_worker(self, error: BaseException, watcher: StepWatcher) -> Failure:
        """Attributes a lost connection to a worker, and publishes the failure if the store answers.

        Candidates in order: a worker that has published a failure meanwhile, a silent worker, the straggler.
        """
        silent = watcher.find_silent(self.is_any)
        if (published := self.present) is not None:  # meanwhile
            return published
        call, seen = self._call, _OUTCOME.sub("", str(error)).rstrip(".")  # the quoting error states the outcome
        if silent is None:
            text = (
                f"the workers' store, which worker 0 or torchrun's agent has opened, does not answer any more ({seen})"
            )
            return Failure(0, call.number, text, is_final=True)
        progress = watcher.progress_of_all()
        rank, text = -1, f"the connection between the workers broke, though all of them live ({seen})"
        if silent:
            others = f", nor {numbered('worker', silent[1:])}" if silent[1:] else ""
            last = f"; it was last seen {progress[silent[0]]}" if silent[0] in progress else ""
            rank, text = silent[0], f"it gives no sign of life{others}: it has ended, or hangs{last} ({seen})"
        elif (behind := least_far(progress)) is not None and behind != self._cluster.rank:
            rank, text = behind, f"it lives, but is behind the others: it is {progress[behind]} ({seen})"
        failure = Failure(rank, call.number, text, bool(silent), call.stage)
        watcher.publish(failure, silent)
        return failure

    def text(self, failure: Failure) -> str:
        if failure.rank < 0:
            return failure.text
        worker = self._cluster.workers[failure.rank]
        if failure.rank == self._cluster.rank:
            return f"the other workers have given up on this one, {worker}: {failure.text}"
        return f"{worker}: {failure.text}"
