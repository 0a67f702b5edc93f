"""Rules on backwards that run as plain PyTorch, where a parameter may have no gradient in a step."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mirrorc.custom_ops.opaque_calls import run_backward
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rule import rule
from mirrorc.verifier.rules.programs import Violation


@rule(since=Stage.CAPTURED)
def updates_leave_out_what_is_unused(program: Program) -> Iterator[Violation]:
    """Where backward runs as plain PyTorch, updates leave out the parameters that no replica has used; in any other program each
    gradient is there in each step."""
    runs_plain = any(next(calls_to(graph, run_backward), None) is not None for graph in _bodies(program))
    for bucket in program.buckets:
        if bucket.rule.may_be_unused is not runs_plain:
            why = "is updated as if each step used all of it" if runs_plain else "may be left out of a step"
            what = "runs as plain PyTorch" if runs_plain else "makes each gradient in each step"
            yield Violation(f"bucket {bucket.index} {why}, but backward {what}")


def _bodies(program: Program) -> Iterator[fx.Graph]:
    """The graphs in which operators may stand that run backward."""
    yield from program.shard_graphs
    for region in program.regions.values():
        yield region.graph_module.graph
