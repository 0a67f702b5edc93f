"""The rule on checks: they stop a step before it has changed anything."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, owners_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rule import rule
from mirrorc.verifier.rules.programs import Violation, scopes


@rule(since=Stage.REPLICATED)
def checks_come_first(program: Program) -> Iterator[Violation]:
    """On every replica, each check comes before all launches and updates, so that nothing has changed when it fails."""
    for where, graph, replicas in scopes(program):
        if next(calls_to(graph, ops.check), None) is None:
            continue
        owners = owners_of(graph)
        too_late: dict[int | None, fx.Node] = {}
        for node in graph.nodes:
            if node.target in ops.LAUNCHES or node.target in ops.UPDATES or node.target in (ops.send, ops.write):
                for replica in replicas if node.target in ops.COLLECTIVES else [owners.get(node)]:
                    too_late.setdefault(replica, node)
            elif node.target is ops.check and (before := too_late.get(owners.get(node))) is not None:
                yield Violation(
                    f"the check {node.kwargs['text']!r} comes after {before.name} on {where(owners.get(node))}: when it fails, "
                    "something may have changed",
                    node,
                )
