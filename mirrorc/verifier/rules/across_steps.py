"""Rules on what a step leaves to the next one: accumulated gradients, and waits and updates in flight."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts
from mirrorc.analysis.communication.handed_over import readers_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, is_computed, is_early, name_of, owners_of, pack_of, replica_of
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.verifier.rules.programs import Violation, last_of_bucket, say_pack, scopes, written_buckets
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


@rule(since=Stage.UPDATED)
def gradients_are_accumulated_once(program: Program) -> Iterator[Violation]:
    """In a program that accumulates, each replica adds each bucket to its sums once, just as it has packed it, and nothing is
    communicated. No other program adds anything to them."""
    yield from _wrong_uses(program, ops.accumulate, Accumulation.ADDS)
    for where, graph, _ in scopes(program) if program.accumulates else ():
        for node in calls_to(graph, *ops.COLLECTIVES, ops.send, ops.recv):
            yield Violation(f"{node.name} on {where(replica_of(node))} communicates: the program accumulates", node)


@rule(since=Stage.PACKED)
def accumulated_gradients_are_added_once(program: Program) -> Iterator[Violation]:
    """In a program that ends an accumulation, each replica adds its sums to each bucket once, just as it has packed it, and
    nothing else takes what it has packed. No other program takes anything of them."""
    yield from _wrong_uses(program, ops.add_accumulated, Accumulation.ENDS)
    for where, graph, _ in scopes(program) if program.accumulation is Accumulation.ENDS else ():
        for pack in calls_to(graph, ops.pack):
            for taker, value in _takers(pack):
                yield Violation(
                    f"{taker.name} on {where(replica_of(pack))} takes {value.name} without the gradients that are accumulated",
                    taker,
                )


def _takers(pack: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What takes a packed bucket, or what is computed from it, before `add_accumulated`; each with what it takes."""
    waiting = [pack]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.target is ops.add_accumulated:
                continue
            if is_computed(user):
                waiting.append(user)
            else:
                yield user, value


def _wrong_uses(program: Program, operation: Any, where_it_is: Accumulation) -> Iterator[Violation]:
    """Where an operation on accumulated gradients is missing, is too many times, or takes something else than its own bucket."""
    expected, what, parts = int(program.accumulation is where_it_is), operation.__name__, BucketParts(program)
    for where, graph, replicas in scopes(program):
        are_packs = operation is ops.add_accumulated
        found = Counter(
            ((pack_of if are_packs else bucket_of)(node), replica_of(node)) for node in calls_to(graph, operation)
        )
        wholes = [(bucket, bucket.own_packs[0]) for bucket in program.buckets]
        for bucket, pack in program.packs if are_packs else wholes:
            for replica in replicas:
                times = found[(pack.number if are_packs else bucket.index, replica)]
                if times != expected:
                    about = say_pack(bucket, pack) if are_packs else f"bucket {bucket.index}"
                    yield Violation(
                        f"{about} has {times} {what} on {where(replica)}, not {expected}",
                        last_of_bucket(graph, bucket.index, replica),
                    )
        for node in calls_to(graph, operation):
            if not _is_own_pack(program, parts, node):
                given = ", ".join(source.name for source in node.all_input_nodes) or "nothing"
                yield Violation(
                    f"{node.name} on {where(replica_of(node))} takes {given}, not what this replica has packed in bucket "
                    f"{bucket_of(node)}",
                    node,
                )


def _is_own_pack(program: Program, parts: BucketParts, node: fx.Node) -> bool:
    """Whether a node is given its replica's own gradients of its bucket, all of them and unchanged."""
    part, index = parts.of(node.args[0] if node.args else None), bucket_of(node)
    if part is None or part.steps or not 0 <= index < len(program.buckets):
        return False
    source: Any = node.args[0]
    is_summed_up = any(one.target is ops.add_accumulated for one in _computed_of(source))
    own = program.workers.first_replica + replica_at(program, node)
    whole = (0, program.buckets[index].num_elements)
    if node.target is ops.add_accumulated:
        packs = program.buckets[index].own_packs
        whole = next(((pack.start, pack.stop) for pack in packs if pack.number == pack_of(node)), (0, 0))
    return part.holds(GRADIENTS, index, *whole, [own]) and not is_summed_up


def _computed_of(value: fx.Node) -> Iterator[fx.Node]:
    """A value and what it is computed of, up to what no operator has computed."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if is_computed(node):
            yield node
            waiting += node.all_input_nodes
