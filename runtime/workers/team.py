"""The team of a step: all workers that train with it, who begin each step together, agree at its end, and fail together.

It is long, as the stages of a call and what each failure means in them are one matter.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from mirrorc.analysis.link_speed import LinkSpeed
from mirrorc.cluster import Cluster
from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.sameness import check_same_facts
from mirrorc.errors import CommunicationError
from mirrorc.printing.wording import numbered
from mirrorc.runtime.communication import StepStoppedError
from mirrorc.runtime.workers.broken_connections import cut_when_broken
from mirrorc.runtime.workers.header import NUM_FIELDS, Agreement, Header, agreement, digest
from mirrorc.runtime.workers.known_counts import KnownCounts
from mirrorc.runtime.workers.lane import Done, Lane, LostConnectionError, in_words
from mirrorc.runtime.workers.opening import all_texts, await_all, measured_speed, open_lane
from mirrorc.runtime.workers.progress import least_far
from mirrorc.runtime.workers.vote import Columns, Vote
from mirrorc.runtime.workers.watcher import Failure, Watcher

_SLACK_SECONDS = 1.0  # what the lanes wait for ends by itself; its text says more
_LONGEST_ANSWER_SECONDS = 10.0  # of the store, after the time to wait for others
_LONGEST_CONNECTING_SECONDS = 5.0  # to the store
_LONGEST_TEXT = 600  # of an error that is told to the others
_BEFORE, _VOTING, _UPDATING, _COMMITTED, _DONE = "before", "voting", "updating", "committed", "done"
_IN_WORDS = {
    "call": "the number of their training calls",
    "kind": "what they call",
    "schedule": "what their programs exchange",
    "variables": "their variables",
    "hyperparameters": "the hyperparameters of their optimizers",
    "modes": "which of their modules are in training mode",
    "parameters": "parameters that each of them has updated by itself, with an optimizer that is not element-wise",
    "deals_anew": "what they have of the optimizer's state, which is to be dealt out anew",
}
_HOST = torch.device("cpu")
_REMEDIES = {
    "parameters": "The optimizer does not give the same numbers everywhere, or something has written on one worker alone: load a "
    "checkpoint of model and optimizer on all workers",
    "deals_anew": "Load it on all workers, or on none",
}
_OF_LIVE_ONES = ("kind", "hyperparameters", "schedule")  # those who have left take these over, or do not know them
_RESTART = "End all workers, and start them again from a checkpoint"
_RESTORE = "Load a checkpoint into model and optimizer on all workers, and call the step again"
_WHAT_IS_SAID_ONCE = re.compile(r"\. (No parameter was changed|It had committed).*", re.DOTALL)

Facts = Callable[[], Mapping[str, object]]
"""Gives what a worker has where workers differ, by name."""


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
        stop: stops the step that runs, unless it is committed; called in another thread.
        finish_rest: does what is left of a call that has returned, in `rest_of_call`, while connections are still open.
        num_calls: how many training calls have begun.
        link: how fast the link between the workers is, as measured when it was opened; None before.
        timeout_seconds: as given.
        have_parted: whether a step has failed when some workers may have updated, and others not, or in part: before the next,
            all take over the values of one worker.
        row_counts: of each worker by rank, the numbers of rows of the factors that it sends in this step, as
            `mirrorc.analysis.sent_factors.row_counts` gives them.
    """

    def __init__(self, cluster: Cluster, name: str, timeout_seconds: float, device: torch.device) -> None:
        self.cluster, self.timeout_seconds, self._device = cluster, timeout_seconds, device
        self.stop: Callable[[], object] = _nothing
        self.num_calls = 0
        self.link: LinkSpeed | None = None
        self.row_counts: Sequence[tuple[int, ...]] = ()
        self._known_counts = KnownCounts()
        self._store: Any = distributed.PrefixStore(name, cluster.store)
        self._watcher = Watcher(self._store, cluster.workers, cluster.rank, self._notice)
        self._lanes: list[Lane] = []  # for words, and for buckets
        self._failures: list[Failure] = []  # which others have published, in their order
        self._stage = _BEFORE
        self._is_early = False  # whether the step that runs commits before all sums are there
        self._left_by = (
            0  # the number of the call that has returned with buckets in flight, maybe of others alone; 0 for none
        )
        self.finish_rest: Callable[[], object] = _nothing
        self._is_in_call = self._is_in_rest = False
        self.have_parted = False
        self._why_over = ""  # why no further step can be made
        self._are_all_raising = False
        self._last_call = [0]
        self._last_words: list[str] = []  # why it leaves the team, if that is known
        self._finalizer = weakref.finalize(
            self, _leave, os.getpid(), self._watcher, cluster.rank, self._lanes, self._last_call, self._last_words
        )

    # A call, from its beginning to its end

    @contextmanager
    def call(self, is_whole: Callable[[], bool], torn: Callable[[], str] = str) -> Iterator[None]:
        """A block that is one training call: what is raised in it, on any worker, ends the call on all of them.

        Args:
            is_whole: whether variables and optimizers are those of some step, asked when a call has failed behind its commit.
            torn: which buckets the step has updated, if it has failed behind an early commit; else empty.

        Raises:
            CommunicationError: another worker has failed; names it, and what has happened to it.
        """
        self.num_calls += 1
        self._last_call[0] = self.num_calls
        self._stage, self._is_early, self._are_all_raising = _BEFORE, False, False
        self._watcher.own = self._watcher.own.begun(self.num_calls)
        self._refuse_if_over()
        self._is_in_call = True
        try:
            self._open()
            yield
        except BaseException as error:
            raised = self._explain(error, is_whole, torn)
            if raised is error:
                raise
            raise raised from error
        finally:
            self.stop, self._is_in_call = _nothing, False
            self._watcher.own = self._watcher.own.ended()

    def _refuse_if_over(self) -> None:
        if self._why_over:
            raise CommunicationError(f"no further step can be made by these workers: {self._why_over}. {_RESTART}")

    def leave_buckets(self) -> None:
        """Called when the call that is about to return leaves buckets in flight."""
        self._left_by = self.num_calls

    @contextmanager
    def rest_of_call(self, torn: Callable[[], str]) -> Iterator[None]:
        """A block that does what is left of a call that has returned; within the next call, or between two.

        Args:
            torn: which buckets that call has updated; asked when the block has failed.

        Raises:
            CommunicationError: the block has failed; names the worker that is behind it, the bucket and the call. It ends the
                next call of the other workers.
        """
        self._is_in_rest = True
        try:
            failure = next((one for one in self._failures if one.ends(self._number_of_next)), None)
            if failure is not None and not failure.leaves_rest:
                self._cut()
            yield
        except BaseException as error:
            raised = self._explain_rest(error, torn)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._is_in_rest = False

    @property
    def _number_of_next(self) -> int:
        """The number of the call that runs, or of the next one."""
        return self.num_calls + (not self._is_in_call)

    def _cut(self) -> None:
        for lane in list(self._lanes):
            lane.cut()

    def _explain_rest(self, error: BaseException, torn: Callable[[], str]) -> BaseException:
        """The error to raise where what is left of a call has failed; the other workers know of it, or are told."""
        number = self._left_by
        if not self._is_in_call:  # it is this worker's next call, which all others find failed
            self.num_calls += 1
            self._last_call[0] = self.num_calls
            self._stage, self._is_early = _BEFORE, False
        elif number == self.num_calls:
            self._why_over = "a connection broke when this worker had told the others that the step takes place"
        was_known = self._failure
        if isinstance(error, LostConnectionError | StepStoppedError):
            known = was_known or self._judge(error)
            told = self._text(known)
        else:
            text = f"it raised {_WHAT_IS_SAID_ONCE.sub('', _in_short(error))}"
            is_final = bool(self._why_over)
            known = Failure(self.cluster.rank, self.num_calls, text, is_final, before_end=True)
            told = f"{self.cluster.workers[known.rank]}: {text}"
            if was_known is None:
                self._watcher.publish(known)
        self._why_over = self._why_over or (self._text(known) if known.is_final else "")
        self._close_lanes()
        self.have_parted, self._left_by, self._are_all_raising = True, 0, True
        if not isinstance(error, Exception):
            return error
        remedy = _RESTART if self._why_over else _RESTORE
        what = _WHAT_IS_SAID_ONCE.sub("", str(error)).rstrip(".")
        more = "" if what in told or known.rank == self.cluster.rank else f" ({what})"
        return CommunicationError(
            f"training call {number} has failed when it had returned and its last buckets were in flight: {told}{more}. "
            f"Parameters are between those before and those after that call: {torn()}. {remedy}."
        )

    def abandon(self, error: BaseException) -> None:
        """Ends the next call of the others, who may wait for it: this worker does not come, because of an error in its own code.

        Does nothing if there are no connections, as when a call has failed, of which all know.
        """
        if self._lanes and not self._why_over:
            self.num_calls += 1
            self._last_call[0] = self.num_calls
            self._stage, self._is_early, self._are_all_raising = _BEFORE, False, False
            self._is_in_call = True
            try:
                self._explain(error, lambda: True, str)
            finally:
                self._is_in_call = False

    def _open(self) -> None:
        """Opens the connections, if there are none.

        Raises:
            LostConnectionError: a worker has failed, has ended, or does not come in time.
        """
        if self._has_failure():
            raise LostConnectionError("another worker has failed")
        if not self._lanes:
            store = self._part_of_store(f"call {self.num_calls}")
            await_all(store, self._watcher, self.cluster, self.timeout_seconds, self._has_failure)
            seconds, number, device = self.timeout_seconds, self.cluster.num_workers, self._device
            for name, place in (("words", _HOST), ("buckets", device)):
                self._lanes.append(open_lane(name, store, self.cluster, seconds, place))
            if self._lanes[1].is_deaf:
                cut_when_broken(self._lanes[1], told=self._lanes[0])
            self.link = measured_speed(self._lanes[1], number, seconds, device)

    def _part_of_store(self, name: str) -> Any:
        """A part of the store, over a connection of its own.

        Raises:
            LostConnectionError: the store does not answer.
        """

        def connected() -> Any:
            self._store.add(
                "asked", 0
            )  # if the store is lost, this fails at once; a new connection would be tried for long
            return self._store.clone()

        try:
            return distributed.PrefixStore(name, in_bounded_time(connected, _LONGEST_CONNECTING_SECONDS))
        except (RuntimeError, TimeoutError) as error:
            raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error

    def _has_failure(self) -> bool:
        return self._failure is not None

    def _is_over(self) -> bool:
        """Whether another worker has failed, or is gone; asked where a worker waits for others in the store."""
        return self._has_failure() or any(lane.is_broken for lane in list(self._lanes))

    @property
    def _failure(self) -> Failure | None:
        """What ends the present call, if anything does: the first that was published."""
        return next((failure for failure in self._failures if failure.ends(self.num_calls)), None)

    def _notice(self, failure: Failure) -> None:
        """Called in the watcher's thread when another worker has failed."""
        number, lanes = self.num_calls, list(self._lanes)
        kept = [known for known in self._failures if known.is_final or known.step >= number]
        self._failures = [*kept, failure]
        if failure.ends(self._number_of_next if self._is_in_rest else number):
            self.stop()
            for lane in lanes[:1] if self._left_by and failure.leaves_rest else lanes:
                lane.cut()

    def _explain(self, error: BaseException, is_whole: Callable[[], bool], torn: Callable[[], str]) -> BaseException:
        """The error to raise for a call that has failed; the other workers know of it, or are told."""
        if self._left_by and not self._are_all_raising:
            try:
                self.finish_rest()  # before connections are closed, here and on the others
            except BaseException as failed:  # noqa: BLE001 - it is what all know of
                return failed
        is_own = not isinstance(error, LostConnectionError | StepStoppedError) or (
            isinstance(error, StepStoppedError) and self._failure is None
        )
        if self._are_all_raising or (is_own and self._stage == _DONE and is_whole()):
            return error  # all raise the like; or the step is made, here as on the others
        was_known = self._has_failure()
        if is_own:
            text = f"it raised {_in_short(error)}"
            has_voted, leaves_rest = self._stage != _BEFORE, bool(self._left_by) and self._stage == _BEFORE
            known = Failure(self.cluster.rank, self.num_calls, text, False, has_voted, self._is_before_end, leaves_rest)
            if self._stage not in (_BEFORE, _UPDATING):
                self._why_over = "this worker's step has failed when it had told the others that it takes place"
            elif isinstance(error, StepStoppedError):
                self._why_over = "this worker's step was closed"
        else:
            known = self._failure or self._judge(error)
            self._why_over = self._why_over_after(known)
        if is_own and not was_known:
            self._watcher.publish(dataclasses.replace(known, is_final=bool(self._why_over)))
        elif self._why_over and not known.is_final:  # the others can go on without this one as little
            text = f"it cannot go on: {self._why_over}"
            self._watcher.publish(Failure(self.cluster.rank, self.num_calls, text, True, self._stage != _BEFORE))
        self._close_lanes()
        left_by, self._left_by = self._left_by, 0
        is_before_vote = self._stage in (_BEFORE, _VOTING)
        lacks_rest = bool(left_by) and left_by != self.num_calls and is_before_vote and not known.leaves_rest
        none_has_committed = self._stage == _VOTING and not (known.had_voted or known.is_final)
        has_parted = (self._is_early and not none_has_committed) or lacks_rest
        self.have_parted = self.have_parted or has_parted
        if is_own:
            return error
        remedy = (
            _RESTART if self._why_over else _RESTORE if has_parted else "The step may be called again, on all workers"
        )
        state = self._state_after_failure(is_whole, torn, has_parted=has_parted and not lacks_rest)
        if lacks_rest:
            state = f"Parameters here are those after training call {left_by}, whose last buckets others may not have updated."
        return CommunicationError(f"training call {self.num_calls} has failed: {self._text(known)}. {state} {remedy}.")

    def _why_over_after(self, known: Failure) -> str:
        """Why no further step can be made after a call that another worker has ended; empty if one can."""
        has_ended_nowhere = self._is_before_end or known.before_end
        if self._stage == _VOTING and (known.had_voted or known.is_final) and not has_ended_nowhere:
            return "a connection broke while they agreed on a step, and it is not known which of them have made it"
        is_over = known.is_final or (self._stage in (_COMMITTED, _DONE) and not has_ended_nowhere)
        return self._text(known) if is_over else ""

    @property
    def _is_before_end(self) -> bool:
        """Whether this worker has committed early, or is about to, and has not told its loss: no worker ends the call without."""
        return self._is_early and self._stage in (_VOTING, _UPDATING)

    def _state_after_failure(self, is_whole: Callable[[], bool], torn: Callable[[], str], *, has_parted: bool) -> str:
        """Says whether a call that another worker has ended has changed anything here."""
        if self._stage == _UPDATING and (what := torn()):
            return f"It had committed: parameters are between those before and those after this step: {what}."
        if has_parted and self._is_before_end:
            return "No parameter was changed here, but other workers may have updated some."
        if self._stage != _COMMITTED:
            return "No parameter was changed."
        if is_whole():
            return "It had committed here: parameters are those after this step."
        return "It had committed: parameters may have been updated in part, so load a checkpoint."

    def _close_lanes(self) -> None:
        have_ended = [lane.close() for lane in self._lanes]
        if not all(have_ended):  # they may still write gradients
            self._why_over = self._why_over or "what was sent to the other workers does not end"
        self._lanes.clear()

    def _text(self, failure: Failure) -> str:
        if failure.rank < 0:
            return failure.text
        if failure.rank == self.cluster.rank:
            return f"the other workers have given up on this one, {self.cluster.workers[failure.rank]}: {failure.text}"
        return f"{self.cluster.workers[failure.rank]}: {failure.text}"

    def _judge(self, error: BaseException) -> Failure:
        """Who is behind a connection that broke, or that tells nothing: who has published it, else who is silent."""
        silent = self._watcher.find_silent(self._has_failure)
        if self._failure is not None:  # published meanwhile
            return self._failure
        seen = _WHAT_IS_SAID_ONCE.sub("", str(error)).rstrip(".")  # that is said at the end
        if silent is None:
            text = (
                f"the workers' store, which worker 0 or torchrun's agent has opened, does not answer any more ({seen})"
            )
            return Failure(0, self.num_calls, text, is_final=True)
        told = self._watcher.progress()
        rank, text = -1, f"the connection between the workers broke, though all of them live ({seen})"
        if silent:
            others = f", nor {numbered('worker', silent[1:])}" if silent[1:] else ""
            last = f"; it was last seen {told[silent[0]]}" if silent[0] in told else ""
            rank, text = silent[0], f"it gives no sign of life{others}: it has ended, or hangs{last} ({seen})"
        elif (behind := least_far(told)) is not None and behind != self.cluster.rank:
            rank, text = behind, f"it lives, but is behind the others: it is {told[behind]} ({seen})"
        found = Failure(rank, self.num_calls, text, bool(silent), self._stage != _BEFORE, self._is_before_end)
        self._watcher.publish(found, num_silent=len(silent))
        return found

    # What workers do together in a call

    def meet(self, own: Header, facts: Mapping[str, Facts], counts: tuple[int, ...] = ()) -> Agreement:
        """Begins a step together with the others.

        Args:
            own: what this worker says of its step.
            facts: for fields in which workers may differ, what this worker has in detail.
            counts: the numbers of rows of the factors that this worker sends.

        Raises:
            CommunicationError: workers differ; all raise it, and name who differs in what.
            ValueError: no worker has examples; all raise it.
            LostConnectionError: the connection broke.
        """
        own = self._known_counts.noted_in(own, counts)
        headers = [torch.empty(NUM_FIELDS, dtype=torch.int64) for _ in self.cluster.workers]
        if own.has_left:
            self._tell(lambda group: group.all_gather(own.to_tensor(), headers, is_patient=True), self._others_live)
        else:
            self._tell(lambda group: group.all_gather(own.to_tensor(), headers))
        found, name, other = agreement(headers)
        self._are_all_raising = found is None or not (found.num_examples or found.is_over)
        if found is not None and self._are_all_raising:
            raise ValueError(
                "no worker has examples in this step, which needs at least one: leave the batch out on all workers"
            )
        if found is not None:
            self._watcher.own = self._watcher.own.met()
            self.row_counts = self._known_counts.of_all(headers, counts, self._tell)
            return found
        left = [bool(Header(*map(int, header)).has_left) for header in headers]
        if name in facts and not (any(left) and name in _OF_LIVE_ONES):
            self._refuse_difference(_IN_WORDS[name], facts[name](), _REMEDIES.get(name, ""))
        one, source = self.cluster.workers[other], self.cluster.workers[left.index(False) if False in left else 0]
        raise CommunicationError(
            f"workers differ in {_IN_WORDS[name]}: {one} says something else than {source}. No parameter was changed. Let all "
            "workers make the same calls in one order"
        )

    def _refuse_difference(self, what: str, facts: Mapping[str, object], remedy: str) -> None:
        """Raises the same error in all workers, with the first thing in which they differ. All call it."""
        store = self._part_of_store(f"facts {self.num_calls}")
        workers, rank, deadline = self.cluster.workers, self.cluster.rank, time.monotonic() + self.timeout_seconds
        try:
            in_bounded_time(
                lambda: check_same_facts(store, workers, rank, what, facts, deadline),
                self.timeout_seconds + _LONGEST_ANSWER_SECONDS,
            )
        except CommunicationError as error:
            end = f" {remedy}." if remedy else ""
            raise CommunicationError(f"{error}. No parameter was changed.{end}") from None
        except (RuntimeError, TimeoutError) as error:
            raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error

    def vote(self, own: Vote, *, columns: Columns, is_early: bool = False) -> tuple[bool, torch.Tensor | None]:
        """Returns when all workers have done all of the step that can fail; from then on it is decided, for all alike.

        Args:
            own: this worker's vote.
            columns: of the replicas with whose numbers all go on; each leaves as many as one of this worker.
            is_early: whether sums, or parameters that others update, are still to come, until `end_updates`.

        Returns:
            Whether the step takes place, as all say; and the numbers that these replicas have left, [numbers of each, columns]
            float64, which reach all workers as they are: others add zeros.

        Raises:
            LostConnectionError: a worker has failed, or the connection broke.
            CommunicationError: the workers have found something else in the same sums.
        """
        num_rows = 0 if own.numbers is None else len(own.numbers)
        message = torch.zeros(2 + num_rows * columns.num, dtype=torch.float64)
        message[0], message[1] = own.takes_place, own.has_sound_sums
        if own.numbers is not None:
            message[2:] = columns.filled(own.numbers).reshape(-1)
        self._stage, self._is_early = _VOTING, is_early
        self._watcher.own = self._watcher.own.ready()
        self._tell(lambda group: group.all_reduce(message))
        self._left_by = 0  # all have done what was left of the call before
        num_yes, num_sound = message[:2].tolist()
        if num_sound not in (0.0, self.cluster.num_workers):
            raise CommunicationError("some workers skip the step, and others make it: what they have summed up differs")
        takes_place = num_yes == self.cluster.num_workers
        self._is_early = is_early and takes_place  # a step that is skipped updates nothing
        self._stage = _UPDATING if self._is_early else _COMMITTED
        return takes_place, message[2:].view(num_rows, columns.num) if num_rows else None

    def end_updates(self) -> None:
        """Called when this worker has all sums, and has updated; then it tells the others its loss."""
        self._stage = _COMMITTED

    def hear(self, text: str) -> list[tuple[str, str]]:
        """The text of each worker, which all tell when they have agreed that a step does not take place; then all raise the like.

        Raises:
            LostConnectionError: a worker has failed, or the connection broke.
        """
        self._stage, self._is_early = _BEFORE, False
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in self.cluster.workers]
        self._tell(lambda group: group.all_gather(torch.tensor([len(own)]), lengths))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(own)] = own
        told = [torch.empty_like(padded) for _ in lengths]
        self._tell(lambda group: group.all_gather(padded, told))
        self._are_all_raising = True
        texts = [bytes(one[: int(length)].tolist()).decode() for one, length in zip(told, lengths, strict=True)]
        return list(zip(map(str, self.cluster.workers), texts, strict=True))

    def compare(self, what: str, facts: Mapping[str, object], remedy: str) -> None:
        """Returns if all workers have equal facts.

        Raises:
            CommunicationError: they differ; all raise it, with who differs in what first, and a remedy.
            LostConnectionError: a worker has failed, or the connection broke.
        """
        told = [torch.empty(1, dtype=torch.int64) for _ in self.cluster.workers]
        own = torch.tensor([digest(repr(list(facts.items())))])
        self._tell(lambda group: group.all_gather(own, told))
        if len(set(map(int, told))) > 1:
            self._are_all_raising = True
            self._refuse_difference(what, facts, remedy)

    def finish(self) -> None:
        """Called when all has been told that a step tells the others."""
        self._stage = _DONE

    def sum(self, tensor: torch.Tensor) -> None:
        """Adds up a dense tensor over all workers, in place."""
        with _on_host(tensor) as own:
            self._tell(lambda group: group.all_reduce(own))

    def copy(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copies the dense tensor of worker ``root`` into those of the others, whatever its dtype."""
        if tensor.numel():
            with _on_host(tensor) as own:
                self._tell(lambda group: group.broadcast(own.view(-1).view(torch.uint8), root))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The 1-D tensors of all workers, which are of one length and dtype, one behind the other in the order of ranks."""
        whole = own.new_empty(own.numel() * self.cluster.num_workers)
        self._tell(lambda group: group.all_gather_whole(own, whole))
        return whole

    @contextmanager
    def raising_alike(self) -> Iterator[None]:
        """A block that raises on all workers alike, or on none, so that nobody needs to be told."""
        try:
            yield
        except CommunicationError:
            self._are_all_raising = True
            raise

    def all_tell(self, about: str, text: str) -> list[str]:
        """What each worker tells about something, by rank: the same texts on all of them, as none tells another one later.

        Raises:
            LostConnectionError: a worker has failed, or tells nothing in time.
        """
        store = self._part_of_store(f"told of {about}")
        return all_texts(store, self.cluster, text, self.timeout_seconds, self._is_over)

    def _tell(self, collective: Callable[[Any], Any], may_wait_on: Callable[[], bool] = lambda: False) -> None:
        lanes = list(self._lanes)
        if not lanes:
            raise LostConnectionError("the connection to the other workers is closed")
        lanes[0].call(collective, self.timeout_seconds + _SLACK_SECONDS, may_wait_on)

    def _others_live(self) -> bool:
        """Whether all other workers show that they live, though they do not call their steps."""
        return self._watcher.find_silent(self._has_failure) == []

    def launch_bucket(self, collective: Callable[[Any], Any], done: Done) -> None:
        """Launches a collective on a bucket; see `Lane.launch`."""
        lanes = list(self._lanes)
        if len(lanes) == 2:
            self._watcher.own = self._watcher.own.sent()
            lanes[1].launch(collective, done)
        else:
            done(LostConnectionError("the connection to the other workers is closed"))

    def end_collectives(self) -> None:
        """Ends the collectives on buckets with an error; called when this worker's step has failed."""
        for lane in self._lanes[1:]:
            lane.cut()

    def note_why(self, error: BaseException) -> None:
        """Notes an error because of which this worker is about to leave, so that the others are told."""
        self._last_words.append(_in_short(error))

    def close(self) -> None:
        """Leaves the team: closes the connections, and tells the others. May be repeated."""
        self._finalizer()


@contextmanager
def _on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor as what workers tell each other over gloo: itself, or a copy of what lies on a GPU, which is then copied back."""
    own = tensor.to(_HOST)
    yield own
    if own is not tensor:
        tensor.copy_(own)


def _nothing() -> None:
    pass


def _in_short(error: BaseException) -> str:
    """An error as it is told to others: its name and its text, on one line."""
    said = " ".join(f"{error}"[:_LONGEST_TEXT].split()).rstrip(".")
    return f"{type(error).__name__}{': ' if said else ''}{said}"


def _leave(
    pid: int, watcher: Watcher, rank: int, lanes: list[Lane], last_call: list[int], last_words: list[str]
) -> None:
    """Ends a worker's part in a team; also when the interpreter ends, but not in a child that was forked."""
    if os.getpid() != pid:
        return
    raised = getattr(sys, "last_value", None)  # what has ended the script, if nobody has closed the step
    words = last_words or ([_in_short(raised)] if isinstance(raised, BaseException) else [])
    text = f"it has closed its step, or its process has ended{f', after {words[0]}' if words else ''}"
    watcher.leave(
        Failure(rank, last_call[0] + 1, text, is_final=True, leaves_rest=True)
    )  # who closes a step finishes it
    for lane in lanes:
        lane.close()
    lanes.clear()
