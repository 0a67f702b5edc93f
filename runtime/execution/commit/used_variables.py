"""The parameters that no replica of a step has used. Updates leave them out."""

from __future__ import annotations

import threading
from collections.abc import Set

import torch

from mirrorc.custom_ops.eager_calls import OpaqueSteps, UsedParameters
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, region_calls, region_of
from mirrorc.ir.program import Program
from mirrorc.runtime.state.accumulation_state import ProgramState
from mirrorc.runtime.state.evaluation_state import EvaluationState


class UsedVariables:
    """Determines at the commit which parameters were used.

    A parameter with an accumulated gradient counts as used. So does a parameter in a bucket with partial exchange,
    because sent elements may be of an earlier step.

    Attributes:
        next: filled by the next run.
        last: filled by the last run.
    """

    def __init__(self, program: Program, state: ProgramState) -> None:
        graphs = [module.graph for module in program.device_graphs.values()]
        calls = [node for graph in graphs for node in region_calls(graph)]
        self._steps = OpaqueSteps([program.regions[region_of(node)].graph_module.graph for node in calls])
        self._program, self._state = program, state
        in_part = {bucket_of(node) for graph in graphs for node in calls_to(graph, *ops.EXCHANGES_OF_PARTS)}
        buckets = [b for b in program.buckets if b.rule.may_be_unused and b.index not in in_part]
        self._places = [(b.index, i, slot.variable) for b in buckets for i, slot in enumerate(b.slots)]
        self.last = self.next = UsedParameters()
        self._begun: UsedParameters | None = None  # of the step that has begun last, until it commits
        self._num_users: torch.Tensor | None = None  # of each parameter in that step, over all workers
        self._unused: dict[int, Set[int]] = {}  # of the step that has committed last
        self._lock = threading.Lock()

    def begin(self) -> None:
        self.last, self.next = self._steps.begin(self.next), UsedParameters()
        begun = self.last
        self._begun, self._num_users = begun if self._places else None, None

    def tell(self) -> torch.Tensor | None:
        """This process's used parameters as ones and zeros, float64 [number]; None if all are always used."""
        used = self._begun
        if used is None:
            return None
        tensors, accumulated = self._state.store.tensors, self._accumulated
        is_used = [name in accumulated or tensors[name] in used for _, _, name in self._places]
        return torch.tensor(is_used, dtype=torch.float64)

    @property
    def _accumulated(self) -> Set[str]:
        return self._state.accumulated.used if not isinstance(self._state, EvaluationState) else frozenset()

    def hear(self, num_users: torch.Tensor | None) -> None:
        self._num_users = num_users

    def settle(self) -> None:
        """Called by each replica after the decision, before its updates."""
        with self._lock:
            num_users = self.tell() if self._num_users is None else self._num_users
            if num_users is None:
                return
            self._begun = self._num_users = None
            self._unused = {}
            for (bucket, place, _), count in zip(self._places, num_users.tolist(), strict=True):
                if not count:
                    self._unused[bucket] = self._unused.get(bucket, frozenset()) | {place}
            if self._program.accumulates and not isinstance(self._state, EvaluationState):
                left_out = {name for bucket, place, name in self._places if place in self._unused.get(bucket, ())}
                self._state.accumulated.note_unused(left_out)

    def unused(self, bucket: int) -> Set[int]:
        """Indices of a bucket's slots without an update in the last committed step."""
        return self._unused.get(bucket, frozenset())
