"""The updates of a step: their progress, and the parameters that they leave out because no replica has used them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx

from mirrorc.custom_ops.eager_calls import OpaqueSteps, UsedParameters
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, is_early, region_calls, region_of
from mirrorc.ir.program import Program
from mirrorc.messages.wording import numbered
from mirrorc.runtime.state.accumulation_state import ProgramState
from mirrorc.runtime.state.evaluation_state import EvaluationState


class UpdateProgress:
    """Records the updates of a step. Thread-safe."""

    def __init__(self, program: Program) -> None:
        self._num_buckets = len(program.buckets)
        nodes = (node for graph in program.graphs() for node in calls_to(graph, *ops.UPDATES, ops.wait))
        self._wanted = Counter(bucket for node in nodes if is_noted(node) for bucket in _buckets_of(node))
        self.begin()

    def begin(self) -> None:
        self._begun: list[int] = []  # appending is one operation, whatever the thread
        self._done: list[int] = []

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def noting(self, node: fx.Node, update: Callable[..., Any]) -> Callable[..., Any]:
        buckets = _buckets_of(node)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._begun.extend(buckets)
            result = update(*args, **kwargs)
            self._done.extend(buckets)
            return result

        return run

    def clause(self) -> str:
        """A clause such as "buckets 0 and 1 of 4 were updated, bucket 2 in part"."""
        done = Counter(self._done)
        whole = sorted(bucket for bucket, number in self._wanted.items() if done[bucket] == number)
        in_part = sorted(set(self._begun) - set(whole))
        number, verb = f"of {self._num_buckets}", "was" if len(whole or in_part) == 1 else "were"
        if not self._begun:
            return f"none {number} buckets was updated"
        if not whole:
            return f"{numbered('bucket', in_part)} {number} {verb} updated in part"
        more = f", {numbered('bucket', in_part)} in part" if in_part else ""
        return f"{numbered('bucket', whole)} {number} {verb} updated{more}"

    def clause_if_begun(self) -> str:
        return self.clause() if self.has_begun else ""


def progress_of(program: Program) -> UpdateProgress | None:
    """None for programs that cannot fail after their commit: those without early commits and gathered parameters."""
    nodes = [node for graph in program.graphs() for node in calls_to(graph, ops.commit, ops.gather_parameters)]
    is_due = any(node.target is ops.gather_parameters or is_early(node) for node in nodes)
    return UpdateProgress(program) if is_due else None


def is_noted(node: fx.Node) -> bool:
    return node.target in ops.UPDATES or (
        node.target is ops.wait and any(source.target is ops.gather_parameters for source in node.all_input_nodes)
    )


def _buckets_of(node: fx.Node) -> tuple[int, ...]:
    several: Any = node.kwargs.get("buckets")
    return tuple(several) if several is not None else (bucket_of(node),)


class UsedVariables:
    """Determines at the commit which parameters were used.

    A parameter with an accumulated gradient counts as used. So does a parameter in a bucket with partial exchange,
    because sent elements may be of an earlier step.
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
