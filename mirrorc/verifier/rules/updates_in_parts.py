"""Rules on updates that make the gradients which they take in parts."""

from __future__ import annotations

from collections.abc import Iterator

from mirrorc.analysis.gradients.tiled_updates import why_not_in_parts
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.programs import Violation, scopes
from mirrorc.verifier.rules.rule import rule


@rule(since=Stage.UPDATED)
def updates_in_parts_take_shares_alone(program: Program) -> Iterator[Violation]:
    """An update that makes its gradient in parts takes a share of a bucket with factors, and nothing else asks of it what these
    do not tell: there is no gradient that anything else could read or scale. It makes at least one element at a time."""
    for where, graph, _ in scopes(program):
        for update in calls_to(graph, ops.update):
            number = update.kwargs.get("part_elements")
            if number is None:
                continue
            why = why_not_in_parts(program, update) if isinstance(number, int) and number > 0 else f"{number} are none"
            if why:
                device = where(replica_of(update))
                yield Violation(
                    f"{update.name} on {device} is to make its gradient {number} elements at a time, but {why}", update
                )
