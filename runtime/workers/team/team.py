"""The team of a step: all workers that train with it, who begin each call together, agree at its end, and fail together."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.cluster import Cluster
from mirrorc.cluster.heartbeat import cause_of_exit, in_short
from mirrorc.runtime.workers.protocol.call_state import CallState, Stage
from mirrorc.runtime.workers.protocol.header import Agreement, Header
from mirrorc.runtime.workers.protocol.known_counts import Counts
from mirrorc.runtime.workers.protocol.vote import Columns, Outcome, Vote, outcome
from mirrorc.runtime.workers.team.control_messages import Words
from mirrorc.runtime.workers.team.failed_calls import FailedCalls
from mirrorc.runtime.workers.team.failure_detector import Failure, Watcher
from mirrorc.runtime.workers.team.failures import Failures
from mirrorc.runtime.workers.team.meetings import Details, Meetings
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import Done, LostConnectionError


class Team:
    """The workers of one step, seen from one of them.

    They have connections of their own: a lane for buckets, and one for what they tell each other. Where a step fails, on any
    worker, it fails on all, before it has changed anything; connections are closed, which ends what still runs, and opened anew
    at the next call.

    Args:
        cluster: the workers, who have joined.
        name: of the step, the same on all workers, and of no other step.
        timeout_seconds: the longest time that a worker waits for another one.
        device: where this worker's buckets lie; of the same type on all workers.

    Attributes:
        cluster, timeout_seconds: as given.
        words: what workers tell each other in a call, besides what begins and ends it.
        connections: which a call opens.
        stop: stops the step that runs, unless it is committed; called in another thread.
        finish_rest: does what is left of a call that has returned, in `rest_of_call`, while connections are still open.
    """

    def __init__(self, cluster: Cluster, name: str, timeout_seconds: float, device: torch.device) -> None:
        self.cluster, self.timeout_seconds = cluster, timeout_seconds
        self.stop: Callable[[], object] = _nothing
        self.finish_rest: Callable[[], object] = _nothing
        store: Any = distributed.PrefixStore(name, cluster.store)
        self._call = CallState()
        self._failures = Failures(cluster, self._call)
        self.connections = Connections(store, cluster, timeout_seconds, device)
        self._watcher = Watcher(store, cluster.workers, cluster.rank, self._notice)
        self.words = Words(cluster, timeout_seconds, self._call, self.connections, self._failures)
        self._meetings = Meetings(cluster, self._call, self.connections, self._failures, self._watcher, self.words)
        self._failed = FailedCalls(cluster, self._call, self.connections, self._failures, self._watcher)
        self._last_words: list[str] = []  # why it leaves the team, if that is known
        self._finalizer = weakref.finalize(
            self, _leave, os.getpid(), self._watcher, cluster.rank, self.connections, self._call, self._last_words
        )

    @property
    def num_calls(self) -> int:
        """How many training calls have begun."""
        return self._call.number

    @property
    def link(self) -> LinkSpeed | None:
        """How fast the link between the workers is, as measured when it was opened; None before."""
        return self.connections.link

    @property
    def row_counts(self) -> Sequence[Counts]:
        """Of each worker by rank, the numbers of rows of the factors that it sends in this step, see `Meetings`."""
        return self._meetings.row_counts

    @property
    def rows_told(self) -> Sequence[Counts]:
        """Of each worker by rank, what it tells of the rows that all replicas gather, see `Meetings`."""
        return self._meetings.rows_told

    @property
    def have_parted(self) -> bool:
        """Whether a step has failed when some workers may have updated, and others not, or in part: before the next, all take
        over the values of one worker."""
        return self._failed.have_parted

    def come_together(self) -> None:
        """Called when all have taken over the values of one worker."""
        self._failed.have_parted = False

    # A call, from its beginning to its end

    @contextmanager
    def call(
        self, is_whole: Callable[[], bool], torn: Callable[[], str] = str, *, has_left: bool = False
    ) -> Iterator[None]:
        """A block that is one training call: what is raised in it, on any worker, ends the call on all of them.

        Args:
            is_whole: whether variables and optimizers are those of some step, asked when a call has failed behind its commit.
            torn: which buckets the step has updated, if it has failed behind an early commit; else empty.
            has_left: whether this worker makes no calls of its own, and waits for others as long as they live.

        Raises:
            CommunicationError: another worker has failed; names it, and what has happened to it.
        """
        self._call.begin()
        self._watcher.own = self._watcher.own.begun(self._call.number)
        self._failed.refuse_if_final()
        self._call.is_running = True
        try:
            if self._failures.is_any():
                raise LostConnectionError("another worker has failed")
            others_live = self._watcher.all_live if has_left else _never
            self.connections.open(self._call.number, self._failures.is_any, lambda: others_live(self._failures.is_any))
            yield
        except BaseException as error:
            raised = self._failed.explain(error, is_whole, torn, self.finish_rest)
            if raised is error:
                raise
            raise raised from error
        finally:
            self.stop, self._call.is_running = _nothing, False
            self._watcher.own = self._watcher.own.ended()

    def abandon(self, error: BaseException) -> None:
        """Ends the next call of the others, who may wait for it: this worker does not come, because of an error in its own code.

        Does nothing if there are no connections, as when a call has failed, of which all know.
        """
        if self.connections.are_open and not self._failed.are_final:
            self._call.begin()
            self._call.is_running = True
            try:
                self._failed.explain(error, lambda: True, str, self.finish_rest)
            finally:
                self._call.is_running = False

    def leave_buckets(self) -> None:
        """Called when the call that is about to return leaves buckets in flight."""
        self._call.left_by = self._call.number

    @contextmanager
    def rest_of_call(self, torn: Callable[[], str]) -> Iterator[None]:
        """A block that does what is left of a call that has returned; within the next call, or between two.

        Args:
            torn: which buckets that call has updated; asked when the block has failed.

        Raises:
            CommunicationError: the block has failed; names the worker that is behind it, the bucket and the call. It ends the
                next call of the other workers.
        """
        self._call.is_in_rest = True
        try:
            failure = self._failures.ending(self._call.number_of_next)
            if failure is not None and not failure.leaves_rest:
                self.connections.cut()
            yield
        except BaseException as error:
            raised = self._failed.explain_rest(error, torn)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._call.is_in_rest = False

    def _notice(self, failure: Failure) -> None:
        """Called in the watcher's thread when another worker has failed."""
        call, lanes = self._call, self.connections.lanes  # those of this call: another may begin before they are cut
        number = call.number
        self._failures.note(failure)
        if failure.ends(call.number_of_next if call.is_in_rest else number):
            self.stop()
            for lane in lanes[:1] if call.left_by and failure.leaves_rest else lanes:
                lane.cut()

    # The stages of a call

    def meet(self, own: Header, facts: Mapping[str, Details], counts: Counts = (), rows_told: Counts = ()) -> Agreement:
        """Begins a step together with the others; see `Meetings.meet`."""
        return self._meetings.meet(own, facts, counts, rows_told)

    def open_values(self) -> None:
        """Opens the lane for values of the model, if it is not open; all workers do so in the same call.

        Raises:
            LostConnectionError: they could not connect.
        """
        self.connections.open_values(self._call.number, self._failures.is_any)

    def vote(self, own: Vote, *, columns: Columns, is_early: bool = False) -> Outcome:
        """Returns when all workers have done all of the step that can fail; from then on it is decided, for all alike.

        Args:
            own: this worker's vote.
            columns: of the replicas with whose numbers all go on; each leaves as many as one of this worker.
            is_early: whether sums, or parameters that others update, are still to come, until `end_updates`.

        Returns:
            What all say. The numbers that these replicas have left reach all workers as they are: others add zeros.

        Raises:
            LostConnectionError: a worker has failed, or the connection broke.
            CommunicationError: the workers have found something else in the same sums.
        """
        call = self._call
        message = own.to_message(columns)
        call.stage, call.is_early = Stage.VOTING, is_early
        self._watcher.own = self._watcher.own.ready()
        self.words.sum(message)
        call.left_by = 0  # all have done what was left of the call before
        num_parameters = len(own.used) if own.used is not None else 0
        found = outcome(message, columns, self.cluster.num_workers, num_parameters)
        call.is_early = is_early and found.takes_place  # a step that is skipped updates nothing
        call.stage = Stage.UPDATING if call.is_early else Stage.COMMITTED
        return found

    def end_updates(self) -> None:
        """Called when this worker has all sums, and has updated; then it tells the others its loss."""
        self._call.stage = Stage.COMMITTED

    def hear(self, text: str) -> list[tuple[str, str]]:
        """The text of each worker, which all tell when they have agreed that a step does not take place; then all raise the like.

        Raises:
            LostConnectionError: a worker has failed, or the connection broke.
        """
        self._call.stage, self._call.is_early = Stage.BEFORE, False
        told = self.words.texts(text)
        self._call.are_all_raising = True
        return told

    def finish(self) -> None:
        """Called when all has been told that a step tells the others."""
        self._call.stage = Stage.DONE

    def launch_bucket(self, collective: Callable[[Any], Any], done: Done) -> None:
        """Launches a collective on a bucket; see `Lane.launch`."""
        if self.connections.are_open:
            self._watcher.own = self._watcher.own.sent()
        self.connections.launch_bucket(collective, done)

    def launch_value(self, collective: Callable[[Any], Any], done: Done) -> None:
        """Launches a collective on a value of the model; see `Lane.launch`."""
        self.connections.launch_value(collective, done)

    # The end of the team

    def note_why(self, error: BaseException) -> None:
        """Notes an error because of which this worker is about to leave, so that the others are told."""
        self._last_words.append(in_short(error))

    def close(self) -> None:
        """Leaves the team: closes the connections, and tells the others. May be repeated."""
        self._finalizer()


def _nothing() -> None:
    pass


def _never(is_known: Callable[[], bool]) -> bool:
    return False


def _leave(
    pid: int, watcher: Watcher, rank: int, connections: Connections, call: CallState, last_words: list[str]
) -> None:
    """Ends a worker's part in a team; also when the interpreter ends, but not in a child that was forked."""
    if os.getpid() != pid:
        return
    why = f", after {last_words[0]}" if last_words else cause_of_exit()  # of the script, if nobody has closed the step
    text = f"it has closed its step, or its process has ended{why}"
    watcher.leave(
        Failure(rank, call.number + 1, text, is_final=True, leaves_rest=True)
    )  # who closes a step finishes it
    connections.close()
