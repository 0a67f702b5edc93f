"""The team of a step: workers that begin each call, commit and fail together."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.cluster import Cluster
from mirrorc.cluster.lost_in_rounds import cause_of_exit, in_short
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState, Failure
from mirrorc.runtime.workers.protocol.header import Agreement, Counts, Header
from mirrorc.runtime.workers.protocol.vote import Columns, Outcome, Vote, outcome
from mirrorc.runtime.workers.team.control_messages import ControlCollectives
from mirrorc.runtime.workers.team.failed_calls import FailedCalls
from mirrorc.runtime.workers.team.meetings import Details, Meetings
from mirrorc.runtime.workers.team.step_watcher import PublishedFailures, StepWatcher
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import Done, LostConnectionError, PayloadError


class Team:
    """The workers of a step.

    A step that fails on any worker fails on all. Connections are then closed, and reopened at the next call.

    Args:
        name: equal on all workers, and unique to the step.
        device: of this worker's buckets; of the same type on all workers.
    """

    def __init__(self, cluster: Cluster, name: str, timeout_seconds: float, device: torch.device) -> None:
        self.cluster, self.timeout_seconds = cluster, timeout_seconds
        self._stop: Callable[[], object] = _nothing
        store: Any = distributed.PrefixStore(name, cluster.store)
        self._call = CallState()
        self._failures = PublishedFailures(cluster, self._call)
        self.connections = Connections(store, cluster, timeout_seconds, device)
        self._watcher = StepWatcher(store, cluster.workers, cluster.rank, self._notice)
        self.control = ControlCollectives(cluster, timeout_seconds, self._call, self.connections, self._failures)
        self._meetings = Meetings(cluster, self._call, self.connections, self._failures, self._watcher, self.control)
        self._failed = FailedCalls(cluster, self._call, self.connections, self._failures, self._watcher)
        self._last_words: list[str] = []  # why it leaves the team, if that is known
        self._finalizer = weakref.finalize(
            self, _leave, os.getpid(), self._watcher, cluster.rank, self.connections, self._call, self._last_words
        )

    @property
    def num_calls(self) -> int:
        return self._call.number

    @property
    def link(self) -> LinkSpeed | None:
        return self.connections.link

    @property
    def row_counts(self) -> Sequence[Counts]:
        return self._meetings.row_counts

    @property
    def gathered_rows(self) -> Sequence[Counts]:
        return self._meetings.gathered_rows

    @property
    def have_parted(self) -> bool:
        """True if workers may have parameters of different steps, so that a broadcast must precede the next step."""
        return self._failed.have_parted

    def come_together(self) -> None:
        """Notes that all workers have received one worker's values."""
        self._failed.have_parted = False

    # A call, from its beginning to its end

    @contextmanager
    def call(
        self, is_whole: Callable[[], bool], torn: Callable[[], str] = str, *, has_left: bool = False
    ) -> Iterator[None]:
        """A context around a training call. An exception on any worker ends the call on all workers.

        Args:
            is_whole, torn: see `FailedCalls.explain`.
            has_left: this worker's loop has ended. It then waits for the others without a timeout.

        Raises:
            CommunicationError: another worker has failed.
        """
        self._call.begin()
        self._watcher.local_progress = self._watcher.local_progress.begun(self._call.number)
        self._failed.refuse_if_final()
        try:
            if self._failures.is_any():
                raise LostConnectionError("another worker has failed")
            others_live = self._watcher.all_live if has_left else _never
            self.connections.open(self._call.number, self._failures.is_any, lambda: others_live(self._failures.is_any))
            yield
        except BaseException as error:
            raised = self._failed.explain(error, is_whole, torn)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._stop = _nothing
            self._watcher.local_progress = self._watcher.local_progress.ended()

    def abandon(self, error: BaseException) -> None:
        """Ends the other workers' next call, because an error in this worker's code keeps it from joining."""
        if self.connections.are_open and not self._failed.are_final:
            self._call.begin()
            self._failed.explain(error, lambda: True, str)

    def _notice(self, failure: Failure) -> None:
        number, lanes = self._call.number, self.connections.lanes  # another call may begin before they are cut
        self._failures.note(failure)
        if failure.ends(number):
            self._stop()
            for lane in lanes:
                lane.cut()

    # The stages of a call

    def stop_on_failure(self, stop: Callable[[], object]) -> None:
        """Makes another thread run ``stop`` when another worker fails."""
        self._stop = stop

    def exchange_headers(
        self, header: Header, facts: Mapping[str, Details], counts: Counts = (), gathered_rows: Counts = ()
    ) -> Agreement:
        return self._meetings.exchange_headers(header, facts, counts, gathered_rows)

    def open_values(self) -> None:
        """Opens the lane for the model's collectives, in the same call on all workers; idempotent."""
        self.connections.open_values(self._call.number, self._failures.is_any)

    def vote(self, vote: Vote, *, columns: Columns, is_early: bool = False) -> Outcome:
        """Exchanges votes with all workers, and returns the decision on the step.

        Args:
            is_early: sums, or parameters updated by other workers, arrive between the vote and `end_updates`.

        Raises:
            CommunicationError: workers find different sums finite, or a worker has failed.
        """
        call = self._call
        message = vote.to_message(columns)
        call.stage = CallStage.VOTING_EARLY if is_early else CallStage.VOTING
        self._watcher.local_progress = self._watcher.local_progress.ready()
        self.control.all_reduce(message)
        num_parameters = len(vote.used) if vote.used is not None else 0
        decision = outcome(message, columns, self.cluster.num_workers, num_parameters)
        # a step that is skipped updates nothing
        call.stage = CallStage.UPDATING if is_early and decision.takes_place else CallStage.DECIDED
        return decision

    def end_updates(self) -> None:
        """Notes that all sums have arrived and all updates are done."""
        self._call.stage = CallStage.UPDATED if self._call.stage is CallStage.UPDATING else CallStage.DECIDED

    def hear(self, text: str) -> list[tuple[str, str]]:
        """Exchanges all workers' texts after a decision against the step, so that all raise the same error."""
        self._call.stage = CallStage.BEFORE
        texts = self.control.all_gather_texts(text)
        self._call.stage = CallStage.REFUSED
        return texts

    def finish(self) -> None:
        self._call.stage = CallStage.DONE

    def launch_bucket(self, collective: Callable[[Any], Any], done: Done) -> None:
        if self.connections.are_open:
            self._watcher.local_progress = self._watcher.local_progress.sent()
        self.connections.launch_bucket(collective, functools.partial(self._end_bucket, done))

    def _end_bucket(self, done: Done, error: Exception | None) -> None:
        """Publishes a payload's failure before the lane is closed, so that other workers do not begin the next pack's
        rounds.
        """
        if isinstance(error, PayloadError):
            self._failed.publish_cause(error)
            self.connections.cut_buckets()
        done(error)

    def launch_value(self, collective: Callable[[Any], Any], done: Done) -> None:
        self.connections.launch_value(collective, done)

    # The end of the team

    def note_why(self, error: BaseException) -> None:
        self._last_words.append(in_short(error))

    def close(self) -> None:
        """Notifies the other workers; idempotent."""
        self._finalizer()


def _nothing() -> None:
    pass


def _never(is_known: Callable[[], bool]) -> bool:
    return False


def _leave(
    pid: int, watcher: StepWatcher, rank: int, connections: Connections, call: CallState, last_words: list[str]
) -> None:
    """Runs at `Team.close` or at exit, but not in a forked child."""
    if os.getpid() != pid:
        return
    why = f", after {last_words[0]}" if last_words else cause_of_exit()  # of the script, if nobody has closed the step
    text = f"it has closed its step, or its process has ended{why}"
    watcher.leave(Failure(rank, call.number + 1, text, is_final=True))
    connections.close()
