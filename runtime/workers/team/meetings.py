"""The exchange of headers at the beginning of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from mirrorc.cluster import Cluster
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState
from mirrorc.runtime.workers.protocol.header import NUM_FIELDS, Agreement, Counts, Header, KnownCounts, agreement
from mirrorc.runtime.workers.team.control_messages import ControlCollectives
from mirrorc.runtime.workers.team.step_watcher import PublishedFailures, StepWatcher
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
_OF_LIVE_ONES = (
    "kind",
    "turn",
    "hyperparameters",
    "schedule",
)  # workers whose loops have ended adopt these, or do not have them

Details = Callable[[], Mapping[str, object]]
"""Returns the facts behind a header field, by name. Called if workers differ in the field."""


class Meetings:
    """The exchanges of headers in a call: one, or several if programs must change first.

    Attributes:
        row_counts, gathered_rows: of all workers in this step, by rank.
    """

    def __init__(
        self,
        cluster: Cluster,
        call: CallState,
        connections: Connections,
        failures: PublishedFailures,
        watcher: StepWatcher,
        control: ControlCollectives,
    ) -> None:
        self._cluster, self._call, self._connections = cluster, call, connections
        self._failures, self._watcher, self._control = failures, watcher, control
        self._known_counts = KnownCounts()
        self.row_counts: Sequence[Counts] = ()
        self.gathered_rows: Sequence[Counts] = ()

    def exchange_headers(
        self, header: Header, facts: Mapping[str, Details], counts: Counts = (), gathered_rows: Counts = ()
    ) -> Agreement:
        """Exchanges headers with all workers. Returns their agreement on the call.

        Args:
            facts: facts behind header fields, for the message if workers differ.
            counts: row counts of this worker's factors.
            gathered_rows: this worker's `gathered_rows`, as many as on other workers with matching programs.

        Raises:
            CommunicationError: workers differ; raised by all, with the worker and the difference.
            ValueError: no worker has examples; raised by all.
            LostConnectionError: the connection is lost.
        """
        run_control = self._connections.run_control
        all_counts = (*counts, *gathered_rows)
        header = self._known_counts.noted_in(header, all_counts)
        headers = [torch.empty(NUM_FIELDS, dtype=torch.int64) for _ in self._cluster.workers]
        if header.has_left:
            others_live = functools.partial(self._watcher.all_live, self._failures.is_any)
            run_control(lambda group: group.all_gather(header.to_tensor(), headers, is_patient=True), others_live)
        else:
            run_control(lambda group: group.all_gather(header.to_tensor(), headers))
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
        self, headers: Sequence[torch.Tensor], facts: Mapping[str, Details], name: str, other: int
    ) -> CommunicationError:
        left = [bool(Header(*map(int, header)).has_left) for header in headers]
        if name in facts and not (any(left) and name in _OF_LIVE_ONES):
            self._control.refuse_difference(_IN_WORDS[name], facts[name](), _REMEDIES.get(name, _REMEDIES["kind"]))
        workers = self._cluster.workers
        worker, source = workers[other], workers[left.index(False) if False in left else 0]
        return problem(
            CommunicationError,
            f"MC6301: workers differ in {_IN_WORDS[name]}",
            f"{worker} says something else than {source}",
            _REMEDIES["kind"],
            now="No parameter was changed",
        )
