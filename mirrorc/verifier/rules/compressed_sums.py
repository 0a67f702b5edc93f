"""Rules on sums that workers send in a narrower dtype, rounded for the wire alone, or of which they send a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.programs import Violation, say, scopes
from mirrorc.verifier.rules.rule import rule


@rule(since=Stage.SCHEDULED)
def compressed_sums_are_decompressed(program: Program) -> Iterator[Violation]:
    """What a worker compresses goes into the exchange of that bucket, or pack, alone; all its replicas compress theirs. The sum
    over workers is decompressed before anything else takes it, and nothing else is."""
    for where, graph, _ in scopes(program):
        for node in calls_to(graph, ops.compress):
            place = where(replica_of(node))
            for user in node.users:
                if user.target is not ops.exchange or _tag(user) != _tag(node):
                    yield Violation(
                        f"{say(node)} on {place} is for the exchange of that bucket alone, and {user.name} takes it",
                        user,
                    )
            if not node.users:
                yield Violation(f"{say(node)} on {place} is sent to nobody", node)
        for node in calls_to(graph, ops.exchange):
            given = [source.target is ops.compress for source in node.all_input_nodes]
            if any(given) and not all(given):
                odd = node.all_input_nodes[given.index(False)]
                yield Violation(f"{say(node)} is given {odd.name}, and what other replicas have compressed", node)
            for wait in node.users if any(given) else ():
                for user in wait.users:
                    if user.target is not ops.decompress:
                        yield Violation(
                            f"{user.name} on {where(replica_of(wait))} takes {wait.name}, which is still compressed",
                            user,
                        )
        for node in calls_to(graph, ops.decompress):
            if not _is_total(node.args[0]) or _tag(node.args[0]) != _tag(node):
                yield Violation(
                    f"{say(node)} on {where(replica_of(node))} is given {node.args[0]}, which is no compressed sum of that "
                    "bucket over all workers",
                    node,
                )


@rule(since=Stage.SCHEDULED)
def parts_are_of_all_that_is_unsent(program: Program) -> Iterator[Violation]:
    """What a worker sends a part of, its largest elements or factors of low rank, has what earlier steps have not sent, on all
    its replicas; and what has that goes into that exchange of its bucket, or pack, alone, which keeps the rest."""
    for where, graph, _ in scopes(program):
        for node in calls_to(graph, ops.add_unsent):
            place = where(replica_of(node))
            for user in node.users:
                if user.target not in ops.EXCHANGES_OF_PARTS or _tag(user) != _tag(node):
                    yield Violation(
                        f"{say(node)} on {place} is for the exchange of a part of it alone, and {user.name} takes it",
                        user,
                    )
            if not node.users:
                yield Violation(f"{say(node)} on {place} is sent to nobody", node)
        for node in calls_to(graph, *ops.EXCHANGES_OF_PARTS):
            for source in node.all_input_nodes:
                if source.target is not ops.add_unsent:
                    yield Violation(
                        f"{say(node)} is given {source.name} on {where(replica_of(source))}, without what earlier steps have not "
                        "sent",
                        node,
                    )


@rule(since=Stage.SCHEDULED)
def low_rank_begins_alike(program: Program) -> Iterator[Violation]:
    """All exchanges of low rank of a program begin at one step, from one seed: the steps are counted for all of them together,
    and factors are kept by the names of variables."""
    found = [node for graph in program.graphs() for node in calls_to(graph, ops.exchange_low_rank)]
    for node in found:
        for word in ("start_step", "seed"):
            if node.kwargs[word] != found[0].kwargs[word]:
                yield Violation(
                    f"{say(node)} has the {word} {node.kwargs[word]}, where {found[0].name} has {found[0].kwargs[word]}",
                    node,
                )


def _is_total(value: Any) -> bool:
    """Whether a value is a sum over workers of what they have compressed."""
    launch = value.args[0] if isinstance(value, fx.Node) and value.target is ops.wait else None
    return (
        isinstance(launch, fx.Node)
        and launch.target is ops.exchange
        and all(source.target is ops.compress for source in launch.all_input_nodes)
    )


def _tag(node: Any) -> tuple[int, int]:
    return bucket_of(node), pack_of(node)
