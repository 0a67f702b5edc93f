"""Rules on checks, which stop a step before any change of state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.rescaling import before_rescaling, gradient_takers, is_checked, taken_by, truths_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, owners_of, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.routes import send_to
from mirrorc.verifier.rules.rule import Order, Violation, calls, rule, scopes


@rule(since=Stage.REPLICATED)
def checks_come_first(program: Program) -> Iterator[Violation]:
    """On every replica, each check comes before all launches, the commit and all writes, so a failing check changes nothing."""
    for where, graph, replicas in scopes(program):
        if next(calls_to(graph, ops.check), None) is None:
            continue
        owners = owners_of(graph)
        too_late: dict[int | None, fx.Node] = {}
        for node in graph.nodes:
            if any(node.target in group for group in (ops.LAUNCHES, ops.WRITERS, (ops.send, ops.commit))):
                for replica in replicas if node.target in ops.COLLECTIVES else [owners.get(node)]:
                    too_late.setdefault(replica, node)
            elif node.target is ops.check and (before := too_late.get(owners.get(node))) is not None:
                yield Violation(
                    f"the check {node.kwargs['text']!r} comes after {before.name} on {where(owners.get(node))}: when it fails, "
                    "something may have changed",
                    node,
                )


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def a_checked_step_misses_nothing(program: Program) -> Iterator[Violation]:
    """In a checked step, each replica's commit takes `is_finite` of all inputs of its updates, and of its unscaled
    loss. Nothing else uses these booleans. All replicas have the same ``otherwise``.
    """
    commits = [node for _, node in calls(program, ops.commit)]
    for _, node in calls(program, ops.is_finite):
        other = next((user for user in node.users if user.target is not ops.commit), None)
        if other is not None:
            yield Violation(f"{other.name} takes {node.name}, which is for the commit alone", node)
    if Property.CHECKED not in program.properties and not any(map(is_checked, commits)):
        return
    for commit in commits:
        if commit.kwargs.get("otherwise") != commits[0].kwargs.get("otherwise"):
            yield Violation(
                f"{commit.name} says {commit.kwargs.get('otherwise')!r} for a step that is not finite, "
                f"{commits[0].name} {commits[0].kwargs.get('otherwise')!r}",
                commit,
            )
    for where, graph, replicas in scopes(program):
        for replica in replicas:
            yield from _missed(graph, replica, where(replica), Property.UNSCALED in program.properties)


def _missed(graph: fx.Graph, replica: int | None, where: str, is_scaled: bool) -> Iterator[Violation]:
    commit = next((node for node in calls_to(graph, ops.commit) if replica_of(node) == replica), None)
    if commit is None:
        return  # `a_step_commits_once` reports it
    takers = [node for node in gradient_takers(graph) if replica_of(node) == replica]
    losses: Any = graph.output_node().args[0]
    loss = losses if replica is None else losses["losses"][replica]
    wanted = {loss: "its loss"} if loss is not None and not is_scaled else {}
    wanted |= {before_rescaling(value): f"what {node.name} takes" for node in takers for _, value in taken_by(node)}
    looked_at = set()
    for flag in truths_of(commit):
        if flag.target is not ops.is_finite or not flag.args or flag.args[0] not in wanted:
            yield Violation(
                f"{commit.name} on {where} is given {flag.name}, which tells of no loss or gradient of it", commit
            )
        looked_at.add(flag.args[0] if flag.args else None)
    for value, description in wanted.items():
        if value not in looked_at:
            yield Violation(
                f"{commit.name} on {where} is not told whether {value.name}, {description}, is finite", commit
            )


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def nothing_is_in_flight_at_a_checked_commit(program: Program) -> Iterator[Violation]:
    """In a checked step, launches and sends before the commit are waited for before it, because the step may end there."""
    commits = [node for _, node in calls(program, ops.commit) if is_checked(node)]
    ends = {(commit.graph, replica_of(commit)): commit for commit in commits}

    def is_after_commit(node: fx.Node) -> bool:
        end = ends.get((node.graph, replica_of(node)))
        return end is not None and end < node

    for _, graph, _ in scopes(program):
        for wait in filter(is_after_commit, calls_to(graph, ops.wait)):
            launch = wait.args[0] if wait.args else None
            if not isinstance(launch, fx.Node):
                continue
            sent = send_to(program, launch) if launch.target is ops.recv else None
            if launch < ends[graph, replica_of(wait)]:
                yield Violation(f"{wait.name} comes after the commit, but {launch.name} before it", wait)
            elif sent is not None and (sent.graph, replica_of(sent)) in ends and not is_after_commit(sent):
                yield Violation(f"{wait.name} comes after the commit, but {sent.name} before it", wait)
