"""The progress of a step's updates, for failures after the commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, is_early
from mirrorc.ir.program import Program
from mirrorc.messages.wording import numbered


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
