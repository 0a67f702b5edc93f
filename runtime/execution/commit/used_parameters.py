"""Which parameters all replicas of a step leave out, because none of them has used them."""

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
    """Finds out at a step's commit which parameters are used in it; updates leave out the others.

    Until then, backwards note what they have used. A gradient that an earlier call has accumulated counts, too. Of a bucket of
    which workers send a part, all counts as used, since what is sent may be of an earlier step.

    Args:
        program: a LOWERED program.
        state: has the user's parameters.
    """

    def __init__(self, program: Program, state: ProgramState) -> None:
        graphs = [module.graph for module in program.device_graphs.values()]
        calls = [node for graph in graphs for node in region_calls(graph)]
        self._steps = OpaqueSteps([program.regions[region_of(node)].graph_module.graph for node in calls])
        self._program, self._state = program, state
        in_part = {bucket_of(node) for graph in graphs for node in calls_to(graph, *ops.EXCHANGES_OF_PARTS)}
        buckets = [b for b in program.buckets if b.rule.may_be_unused and b.index not in in_part]
        self._places = [(b.index, i, slot.variable) for b in buckets for i, slot in enumerate(b.slots)]
        self._begun: UsedParameters | None = None  # of the step that has begun last, until it commits
        self._told: torch.Tensor | None = None  # what all workers have said of it
        self._unused: dict[int, Set[int]] = {}  # of the step that has committed last
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Called before each step."""
        begun = self._steps.begin()
        self._begun, self._told = begun if self._places else None, None

    def tell(self) -> torch.Tensor | None:
        """Which of the parameters this process has used, [number] float64, ones and zeros; None if none can be unused.

        Called when all replicas of this process have come to the commit.
        """
        used = self._begun
        if used is None:
            return None
        tensors, kept = self._state.store.tensors, self._kept
        found = [name in kept or tensors[name] in used for _, _, name in self._places]
        return torch.tensor(found, dtype=torch.float64)

    @property
    def _kept(self) -> Set[str]:
        """The parameters of which gradients are kept that earlier calls have accumulated."""
        return self._state.accumulated.used if not isinstance(self._state, EvaluationState) else frozenset()

    def hear(self, told: torch.Tensor | None) -> None:
        """Takes the sum of what all workers have told."""
        self._told = told

    def settle(self) -> None:
        """Called by each replica when the step is decided, before it updates."""
        with self._lock:
            told = self.tell() if self._told is None else self._told
            if told is None:
                return
            self._begun = self._told = None
            self._unused = {}
            for (bucket, place, _), count in zip(self._places, told.tolist(), strict=True):
                if not count:
                    self._unused[bucket] = self._unused.get(bucket, frozenset()) | {place}
            if self._program.accumulates and not isinstance(self._state, EvaluationState):
                left_out = {name for bucket, place, name in self._places if place in self._unused.get(bucket, ())}
                self._state.accumulated.note_unused(left_out)

    def unused(self, bucket: int) -> Set[int]:
        """The slots of a bucket, by their places, whose parameters the step that has committed last leaves out."""
        return self._unused.get(bucket, frozenset())
