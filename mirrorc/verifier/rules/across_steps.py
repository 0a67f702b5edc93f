"""Rules on what a step leaves to the next one: waits and updates of buckets, which come before that reads their parameters."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator

from torch import fx

from mirrorc.analysis.communication.handed_over import readers_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, is_computed, is_early, name_of, owners_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.programs import Violation, last_of_bucket, scopes, written_buckets
from mirrorc.verifier.rules.rule import rule


@rule(since=Stage.SCHEDULED)
def a_step_hands_over_once(program: Program) -> Iterator[Violation]:
    """Each replica hands the loss over once, or none does: behind its early commit. Behind that come waits for sums over workers,
    what is computed of them, and updates with it, or waits for parameters, of the same buckets on all replicas."""
    everyone = [(where, graph, replica) for where, graph, replicas in scopes(program) for replica in replicas]
    if not any(any(True for _ in calls_to(graph, ops.hand_over)) for _, graph, _ in scopes(program)):
        return
    first: tuple[str, set[int]] | None = None
    for where, graph, replica in everyone:
        own = [node for node in calls_to(graph, ops.hand_over) if replica_of(node) == replica]
        if len(own) != 1:
            yield Violation(f"{where(replica)} hands over {len(own)} times, not once", own[-1] if own else None)
            continue
        commits = [node for node in calls_to(graph, ops.commit) if replica_of(node) == replica]
        if not any(commit < own[0] and is_early(commit) for commit in commits):
            yield Violation(f"{own[0].name} on {where(replica)} comes before an early commit", own[0])
        owners = owners_of(graph)
        behind = [node for node, owner in owners.items() if owner == replica and node > own[0] and node.op != "output"]
        for node in behind:
            if not _may_come_late(node):
                yield Violation(
                    f"{name_of(node)} on {where(replica)} comes behind {own[0].name}: the caller has the loss by then, and "
                    "would not wait for it",
                    node,
                )
        updated = {index for node in behind for index in written_buckets(node)}
        waited = {bucket_of(node) for node in behind if node.target is ops.wait}
        found = updated | waited
        first = first or (where(replica), found)
        if found != first[1]:
            other = sorted(found ^ first[1])[0]
            yield Violation(
                f"bucket {other} is handed over on {where(replica)} or on {first[0]}, not on both: replicas would use new and "
                "old parameters of it",
                last_of_bucket(graph, other, replica),
            )


def _may_come_late(node: fx.Node) -> bool:
    """Whether a node may come when the caller has its loss."""
    if node.target is ops.wait:
        return all(source.target in ops.BETWEEN_WORKERS for source in node.all_input_nodes)
    return node.target in (ops.update, operator.getitem) or is_computed(node)


@rule(since=Stage.SCHEDULED)
def handed_over_buckets_are_awaited(program: Program) -> Iterator[Violation]:
    """Each replica awaits the update of each bucket that a step hands over, once, before it reads a parameter of the bucket and
    before it fills the bucket; of no other bucket."""
    for where, graph, replicas in scopes(program):
        begins = {replica_of(node): node for node in calls_to(graph, ops.hand_over)}
        for replica in replicas:
            awaits = [node for node in calls_to(graph, ops.await_update) if replica_of(node) == replica]
            times = Counter(map(bucket_of, awaits))
            begin = begins.get(replica)
            waits = [node for node in calls_to(graph, ops.wait, ops.update) if replica_of(node) == replica]
            late = {bucket_of(node) for node in waits if begin is not None and node > begin}
            for index in sorted({*late, *times}):
                if times[index] != (index in late):
                    at = next((node for node in awaits if bucket_of(node) == index), begin)
                    yield Violation(
                        f"{where(replica)} awaits the update of bucket {index} {times[index]} times, not {int(index in late)}",
                        at,
                    )
            for node in awaits:
                if not 0 <= bucket_of(node) < len(program.buckets):
                    continue  # `references_are_valid` says so
                early = [one for one in readers_of(graph, program.buckets[bucket_of(node)], replica) if one < node]
                if early:
                    yield Violation(
                        f"{early[0].name} on {where(replica)} comes before {node.name}: it would take parameters, or memory of "
                        "gradients, that the step before has not updated yet",
                        early[0],
                    )
