"""Rules on gradients that a call keeps for a later call, or leaves to the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, is_computed, pack_of, reached, replica_of
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.verifier.rules.rule import Violation, calls, last_of_bucket, rule, say_pack, scopes


@rule(since=Stage.UPDATED)
def gradients_are_accumulated_once(program: Program) -> Iterator[Violation]:
    """In a program that accumulates gradients, each replica adds each packed bucket to its accumulated gradients once,
    and communicates nothing. No other program adds to the accumulated gradients.
    """
    yield from _wrong_uses(program, ops.accumulate, Accumulation.ADDS)
    for where, node in calls(program, *ops.COLLECTIVES, ops.send, ops.recv) if program.accumulates else ():
        yield Violation(f"{node.name} on {where(replica_of(node))} communicates: the program accumulates", node)


@rule(since=Stage.PACKED)
def accumulated_gradients_are_added_once(program: Program) -> Iterator[Violation]:
    """In a program that ends an accumulation, each replica adds its accumulated gradients to each packed bucket once,
    and nothing else uses that bucket. No other program reads the accumulated gradients.
    """
    yield from _wrong_uses(program, ops.add_accumulated, Accumulation.ENDS)
    for where, pack in calls(program, ops.pack) if program.accumulation is Accumulation.ENDS else ():
        for taker, value in _takers(pack):
            yield Violation(
                f"{taker.name} on {where(replica_of(pack))} takes {value.name} without the gradients that are accumulated",
                taker,
            )


@rule(since=Stage.UPDATED)
def gradients_are_left_once(program: Program) -> Iterator[Violation]:
    """In a program that leaves gradients to the user, replica 0 adds the sum of each bucket over all replicas to
    ``grad`` once. No other replica, and no other program, writes ``grad``.
    """
    parts = BucketParts(program)
    for i, (where, graph, replicas) in enumerate(scopes(program)):
        nodes = list(calls_to(graph, ops.add_to_grad))
        is_first = program.leaves_gradients and (program.graph is not None or i == 0)
        for bucket in program.buckets:
            times = sum(bucket_of(node) == bucket.index for node in nodes)
            if times != is_first:
                added = f"bucket {bucket.index} is added to the user's gradients {times} times"
                at = last_of_bucket(graph, bucket.index, replicas[0])
                yield Violation(f"{added} on {where(replicas[0])}, not {int(is_first)}", at)
        for node in nodes:
            if replica_at(program, node) != 0:
                yield Violation(f"{node.name} is not on replica 0, whose parameters are the user's", node)
            index, part = bucket_of(node), parts.of(node.args[0] if node.args else None)
            whole = (0, program.buckets[index].num_elements if 0 <= index < len(program.buckets) else 0)
            if part is None or not part.holds(GRADIENTS, index, *whole, program.reduced_replicas):
                operands = ", ".join(source.name for source in node.all_input_nodes) or "nothing"
                yield Violation(f"{node.name} takes {operands}, not the sum of bucket {index} over all replicas", node)


def _takers(pack: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
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
    expected, name, parts = int(program.accumulation is where_it_is), operation.__name__, BucketParts(program)
    for where, graph, replicas in scopes(program):
        are_packs = operation is ops.add_accumulated
        uses = Counter(
            ((pack_of if are_packs else bucket_of)(node), replica_of(node)) for node in calls_to(graph, operation)
        )
        wholes = [(bucket, bucket.launch_units[0]) for bucket in program.buckets]
        for bucket, pack in program.packs if are_packs else wholes:
            for replica in replicas:
                times = uses[(pack.number if are_packs else bucket.index, replica)]
                if times != expected:
                    about = say_pack(bucket, pack) if are_packs else f"bucket {bucket.index}"
                    yield Violation(
                        f"{about} has {times} {name} on {where(replica)}, not {expected}",
                        last_of_bucket(graph, bucket.index, replica),
                    )
        for node in calls_to(graph, operation):
            if not _takes_local_pack(program, parts, node):
                operands = ", ".join(source.name for source in node.all_input_nodes) or "nothing"
                yield Violation(
                    f"{node.name} on {where(replica_of(node))} takes {operands}, not what this replica has packed in bucket "
                    f"{bucket_of(node)}",
                    node,
                )


def _takes_local_pack(program: Program, parts: BucketParts, node: fx.Node) -> bool:
    part, index = parts.of(node.args[0] if node.args else None), bucket_of(node)
    if part is None or part.steps or not 0 <= index < len(program.buckets):
        return False
    source: Any = node.args[0]
    values = reached([source], lambda value: value.all_input_nodes if is_computed(value) else ())
    is_summed_up = any(value.target is ops.add_accumulated for value in values)
    replica = program.workers.first_replica + replica_at(program, node)
    whole = (0, program.buckets[index].num_elements)
    if node.target is ops.add_accumulated:
        packs = program.buckets[index].launch_units
        whole = next(((pack.start, pack.stop) for pack in packs if pack.number == pack_of(node)), (0, 0))
    return part.holds(GRADIENTS, index, *whole, [replica]) and not is_summed_up
