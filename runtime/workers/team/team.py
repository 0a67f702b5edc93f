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
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState, Failure
from mirrorc.runtime.workers.protocol.header import (
    NUM_FIELDS,
    Agreement,
    Counts,
    Details,
    Header,
    KnownCounts,
    agreement,
)
from mirrorc.runtime.workers.protocol.vote import Columns, Outcome, Vote, outcome
from mirrorc.runtime.workers.team.control_messages import ControlCollectives
from mirrorc.runtime.workers.team.failed_calls import FailedCalls
from mirrorc.runtime.workers.team.step_watcher import PublishedFailures, StepWatcher
from mirrorc.runtime.workers.transport.connections import BUCKETS, VALUES, Connections
from mirrorc.runtime.workers.transport.lane import Done, LostConnectionError, PayloadError

_IN_WORDS = {
    "call": "the number of their training calls",
    "kind": "what they call",
    "turn": "which step of mirrorc.join() they call",
    "schedule": "what their programs exchange",
    "variables": "their variables",
    "hyperparameters": "the hyperparameters of their optimizers",
    "modes": "which of their modules are in training mode",
    "parameters": "parameters that each of them has updated by itself, with an optimizer that is not element-wise",
    "deals_anew": "what they have of the optimizer's state, which is to be dealt out anew",
}
_REMEDIES = {
    "kind": "make the same calls in one order, on all workers",
    "variables": "compile the same model, on all workers",
    "hyperparameters": "the same optimizer.param_groups, on all workers",
    "modes": "model.train() or model.eval(), on all workers",
    "parameters": "load a checkpoint of model and optimizer on all workers: the optimizer does not give the same numbers "
    "everywhere, or something has written on one worker alone",
    "deals_anew": "optimizer.load_state_dict(state) on all workers, or on none",
    "schedule": "let forward go the same way on all of them, and freeze the same: where numbers that Python draws decide, give "
    "all the same seeds (random.seed, numpy.random.seed, torch.manual_seed)",
}
# workers whose loops have ended adopt these, or do not have them
_OF_LIVE_ONES = ("kind", "turn", "hyperparameters", "schedule")


class Team:
    """The workers of a step.

    A step that fails on any worker fails on all. Connections are then closed, and reopened at the next call.

    Args:
        name: equal on all workers, and unique to the step.
        device: of this worker's buckets; of the same type on all workers.

    Attributes:
        row_counts, gathered_rows: of all workers in this call, by rank.
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
        self._known_counts = KnownCounts()
        self.row_counts: Sequence[Counts] = ()
        self.gathered_rows: Sequence[Counts] = ()
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
        """
        self._call.begin()
        self._watcher.local_progress = self._watcher.local_progress.begun(self._call.number)
        self._failed.refuse_if_final()
        try:
            if self._failures.is_any():
                raise LostConnectionError("another worker has failed")
            is_any = self._failures.is_any
            self.connections.open(self._call.number, is_any, lambda: has_left and self._watcher.all_live(is_any))
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
        """Exchanges headers with all workers. Returns their agreement on the call.

        Args:
            facts: facts behind header fields, for the message if workers differ.
            gathered_rows: this worker's `gathered_rows`, as many as on other workers with matching programs.

        Raises:
            CommunicationError: workers differ; raised by all, with the worker and the difference.
            ValueError: no worker has examples; raised by all.
            LostConnectionError: the connection is lost.
        """
        run_control = self.connections.run_control
        all_counts = (*counts, *gathered_rows)
        header = self._known_counts.noted_in(header, all_counts)
        messages = [torch.empty(NUM_FIELDS, dtype=torch.int64) for _ in self.cluster.workers]
        if header.has_left:
            others_live = functools.partial(self._watcher.all_live, self._failures.is_any)
            run_control(lambda group: group.all_gather(header.to_tensor(), messages, is_patient=True), others_live)
        else:
            run_control(lambda group: group.all_gather(header.to_tensor(), messages))
        headers = list(map(Header.of, messages))
        agreed, name, other = agreement(headers)
        if agreed is None:
            self._call.stage = CallStage.REFUSED
            raise self._difference(headers, facts, name, other)
        if not (agreed.num_examples or agreed.is_over):
            self._call.stage = CallStage.REFUSED
            raise problem(
                ValueError,
                "MC6303: no worker has examples in this call, which needs at least one",
                fix="leave this batch out, on all workers",
            )
        self._watcher.local_progress = self._watcher.local_progress.met()
        all_rows = self._known_counts.of_all(headers, all_counts, run_control)
        num_gathered = len(gathered_rows)
        self.row_counts = [rows[: len(rows) - num_gathered] for rows in all_rows]
        self.gathered_rows = [rows[len(rows) - num_gathered :] for rows in all_rows]
        return agreed

    def _difference(
        self, headers: Sequence[Header], facts: Mapping[str, Details], name: str, other: int
    ) -> CommunicationError:
        left = [bool(peer.has_left) for peer in headers]
        if name in facts and not (any(left) and name in _OF_LIVE_ONES):
            self.control.refuse_difference(_IN_WORDS[name], facts[name](), _REMEDIES.get(name, _REMEDIES["kind"]))
        workers = self.cluster.workers
        worker, source = workers[other], workers[left.index(False) if False in left else 0]
        return problem(
            CommunicationError,
            f"MC6301: workers differ in {_IN_WORDS[name]}",
            f"{worker} says something else than {source}",
            _REMEDIES["kind"],
            now="No parameter was changed",
        )

    def open_values(self) -> None:
        """Opens the lane for the model's collectives, in the same call on all workers; idempotent."""
        self.connections.open_values(self._call.number, self._failures.is_any)

    def vote(self, vote: Vote, *, columns: Columns, is_early: bool = False) -> Outcome:
        """Exchanges votes with all workers, and returns the decision on the step.

        Args:
            is_early: sums, or parameters updated by other workers, arrive between the vote and `end_updates`.
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
        self.connections.launch(BUCKETS, collective, functools.partial(self._end_bucket, done))

    def _end_bucket(self, done: Done, error: Exception | None) -> None:
        """Publishes a payload's failure before the lane is closed: no worker begins the next pack's rounds."""
        if isinstance(error, PayloadError):
            self._failed.publish_cause(error)
            self.connections.cut_buckets()
        done(error)

    def launch_value(self, collective: Callable[[Any], Any], done: Done) -> None:
        self.connections.launch(VALUES, collective, done)

    # The end of the team

    def note_why(self, error: BaseException) -> None:
        self._last_words.append(in_short(error))

    def close(self) -> None:
        """Notifies the other workers; idempotent."""
        self._finalizer()


def _nothing() -> None:
    pass


def _leave(
    pid: int, watcher: StepWatcher, rank: int, connections: Connections, call: CallState, last_words: list[str]
) -> None:
    """Runs at `Team.close` or at exit, but not in a forked child."""
    if os.getpid() != pid:
        return
    why = f", after {last_words[0]}" if last_words else cause_of_exit()  # of the script, if nobody has closed the step
    text = f"it has closed its step or module, or its process has ended{why}"
    watcher.leave(Failure(rank, call.number + 1, text, is_final=True))
    connections.close()
