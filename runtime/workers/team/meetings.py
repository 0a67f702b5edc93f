"""The meeting of all workers at the beginning of a call: what they say of their steps, and how a difference is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from mirrorc.cluster import Cluster
from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.call_state import CallState
from mirrorc.runtime.workers.protocol.header import NUM_FIELDS, Agreement, Header, agreement
from mirrorc.runtime.workers.protocol.known_counts import Counts, KnownCounts
from mirrorc.runtime.workers.team.control_messages import Words
from mirrorc.runtime.workers.team.failure_detector import Watcher
from mirrorc.runtime.workers.team.failures import Failures
from mirrorc.runtime.workers.transport.connections import Connections

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
    "parameters": "The optimizer does not give the same numbers everywhere, or something has written on one worker alone: load a "
    "checkpoint of model and optimizer on all workers",
    "deals_anew": "Load it on all workers, or on none",
    "schedule": "Let forward go the same way on all of them, and freeze the same: where numbers that Python draws decide, give "
    "all the same seeds (random.seed, numpy.random.seed, torch.manual_seed)",
}
_OF_LIVE_ONES = (
    "kind",
    "turn",
    "hyperparameters",
    "schedule",
)  # those who have left take these over, or do not know them

Details = Callable[[], Mapping[str, object]]
"""Gives what a worker has where workers differ, by name."""


class Meetings:
    """Has the workers of a team meet, once or several times in each call.

    Args:
        cluster: the workers.
        call: how far this one is.
        connections: of the team.
        failures: of its workers.
        watcher: tells who lives, and the others how far this worker is.
        words: by which the others are told a difference.

    Attributes:
        row_counts: of each worker by rank, the numbers of rows of the factors that it sends in this step, as
            `mirrorc.analysis.gradients.sent_factors.row_counts` gives them.
        rows_told: likewise, what each tells of the rows that all replicas gather.
    """

    def __init__(
        self,
        cluster: Cluster,
        call: CallState,
        connections: Connections,
        failures: Failures,
        watcher: Watcher,
        words: Words,
    ) -> None:
        self._cluster, self._call, self._connections = cluster, call, connections
        self._failures, self._watcher, self._words = failures, watcher, words
        self._known_counts = KnownCounts()
        self.row_counts: Sequence[Counts] = ()
        self.rows_told: Sequence[Counts] = ()

    def meet(self, own: Header, facts: Mapping[str, Details], counts: Counts = (), rows_told: Counts = ()) -> Agreement:
        """Begins a step together with the others.

        Args:
            own: what this worker says of its step.
            facts: for fields in which workers may differ, what this worker has in detail.
            counts: the numbers of rows of the factors that this worker sends.
            rows_told: what it tells of the rows that all replicas gather; as many numbers on all workers whose programs agree.

        Raises:
            CommunicationError: workers differ; all raise it, and name who differs in what.
            ValueError: no worker has examples; all raise it.
            LostConnectionError: the connection broke.
        """
        tell = self._connections.tell
        all_counts = (*counts, *rows_told)
        own = self._known_counts.noted_in(own, all_counts)
        headers = [torch.empty(NUM_FIELDS, dtype=torch.int64) for _ in self._cluster.workers]
        if own.has_left:
            others_live = functools.partial(self._watcher.all_live, self._failures.is_any)
            tell(lambda group: group.all_gather(own.to_tensor(), headers, is_patient=True), others_live)
        else:
            tell(lambda group: group.all_gather(own.to_tensor(), headers))
        found, name, other = agreement(headers)
        self._call.are_all_raising = found is None or not (found.num_examples or found.is_over)
        if found is None:
            raise self._difference(headers, facts, name, other)
        if self._call.are_all_raising:
            raise ValueError(
                "no worker has examples in this step, which needs at least one: leave the batch out on all workers"
            )
        self._watcher.own = self._watcher.own.met()
        said = self._known_counts.of_all(headers, all_counts, tell)
        num_told = len(rows_told)
        self.row_counts = [one[: len(one) - num_told] for one in said]
        self.rows_told = [one[len(one) - num_told :] for one in said]
        return found

    def _difference(
        self, headers: Sequence[torch.Tensor], facts: Mapping[str, Details], name: str, other: int
    ) -> CommunicationError:
        """The error for a field in which a worker differs; or raises one that says more."""
        left = [bool(Header(*map(int, header)).has_left) for header in headers]
        if name in facts and not (any(left) and name in _OF_LIVE_ONES):
            self._words.refuse_difference(_IN_WORDS[name], facts[name](), _REMEDIES.get(name, ""))
        workers = self._cluster.workers
        one, source = workers[other], workers[left.index(False) if False in left else 0]
        return CommunicationError(
            f"workers differ in {_IN_WORDS[name]}: {one} says something else than {source}. No parameter was changed. Let all "
            "workers make the same calls in one order"
        )
