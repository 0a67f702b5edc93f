"""Failures that workers publish, and the search for the cause of an unpublished failure."""

from __future__ import annotations

import re

from mirrorc.cluster import Cluster
from mirrorc.messages.wording import numbered
from mirrorc.runtime.workers.protocol.call_progress import least_far
from mirrorc.runtime.workers.protocol.call_state import CallState, Failure
from mirrorc.runtime.workers.team.step_watcher import StepWatcher

_OUTCOME = re.compile(
    r"(\. |\n  now:  )(No parameter was changed|The update had begun|The update was made).*", re.DOTALL
)


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
        call, seen = self._call, _without_outcome(error)  # the outcome follows at the end
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


def _without_outcome(error: BaseException) -> str:
    """Drops the outcome ("No parameter was changed...") of an error's text, because the quoting error states the
    outcome.
    """
    return _OUTCOME.sub("", str(error)).rstrip(".")
