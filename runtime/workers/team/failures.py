"""The failures of a team's workers: those that were published, and who is behind one of which nobody has told."""

from __future__ import annotations

import re

from mirrorc.cluster import Cluster
from mirrorc.messages.wording import numbered
from mirrorc.runtime.workers.protocol.call_progress import least_far
from mirrorc.runtime.workers.protocol.call_state import CallState
from mirrorc.runtime.workers.team.failure_detector import Failure, Watcher

_OUTCOME = re.compile(r"\. (No parameter was changed|It had committed).*", re.DOTALL)


class Failures:
    """What has ended calls of a team, seen from one worker.

    Args:
        cluster: the workers.
        call: how far this one is.
    """

    def __init__(self, cluster: Cluster, call: CallState) -> None:
        self._cluster, self._call = cluster, call
        self._published: list[Failure] = []  # by others, in their order

    def note(self, failure: Failure) -> None:
        """Notes what another worker has published; called in the watcher's thread."""
        number = self._call.number
        kept = [known for known in self._published if known.is_final or known.step >= number]
        self._published = [*kept, failure]

    def ending(self, call: int) -> Failure | None:
        """What ends a call, given by its number, if anything does: the first that was published."""
        return next((failure for failure in self._published if failure.ends(call)), None)

    @property
    def present(self) -> Failure | None:
        """What ends the present call, if anything does."""
        return self.ending(self._call.number)

    def is_any(self) -> bool:
        """Whether anything ends the present call."""
        return self.present is not None

    def judge(self, error: BaseException, watcher: Watcher) -> Failure:
        """Who is behind a connection that broke, or that tells nothing: who has published it, else who is silent.

        Args:
            error: what this worker has seen of it.
            watcher: tells who lives; publishes the finding.
        """
        silent = watcher.find_silent(self.is_any)
        if (published := self.present) is not None:  # meanwhile
            return published
        call, seen = self._call, _without_outcome(error)  # the outcome is said at the end
        if silent is None:
            text = (
                f"the workers' store, which worker 0 or torchrun's agent has opened, does not answer any more ({seen})"
            )
            return Failure(0, call.number, text, is_final=True)
        told = watcher.progress()
        rank, text = -1, f"the connection between the workers broke, though all of them live ({seen})"
        if silent:
            others = f", nor {numbered('worker', silent[1:])}" if silent[1:] else ""
            last = f"; it was last seen {told[silent[0]]}" if silent[0] in told else ""
            rank, text = silent[0], f"it gives no sign of life{others}: it has ended, or hangs{last} ({seen})"
        elif (behind := least_far(told)) is not None and behind != self._cluster.rank:
            rank, text = behind, f"it lives, but is behind the others: it is {told[behind]} ({seen})"
        found = Failure(rank, call.number, text, bool(silent), call.has_voted, call.is_before_end)
        watcher.publish(found, silent)
        return found

    def text(self, failure: Failure) -> str:
        """A failure as it is told here: whose it is, and what has happened."""
        if failure.rank < 0:
            return failure.text
        worker = self._cluster.workers[failure.rank]
        if failure.rank == self._cluster.rank:
            return f"the other workers have given up on this one, {worker}: {failure.text}"
        return f"{worker}: {failure.text}"


def _without_outcome(error: BaseException) -> str:
    """The text of an error, without what it says of parameters and remedies, which an error that cites it says by itself."""
    return _OUTCOME.sub("", str(error)).rstrip(".")
