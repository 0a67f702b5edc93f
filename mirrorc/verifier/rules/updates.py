"""Rules on what writes variables, and when."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.bucket_parts import GRADIENTS, PARAMETERS, BucketParts, Part
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to, is_compute, is_region_call, region_of, replica_of
from mirrorc.ir.program import Program
from mirrorc.ir.routes import place_of, replica_at
from mirrorc.ir.variables import Placement
from mirrorc.verifier.rules.programs import (
    Violation,
    last_of_bucket,
    say,
    scopes,
    tag,
    written_buckets,
)


def every_bucket_is_updated_once(program: Program) -> Iterator[Violation]:
    """Each copy of a bucket's parameters is updated exactly once, element by element, from the reduced bucket."""
    parts = BucketParts(program)
    for where, graph, replicas in scopes(program):
        done: Counter[tuple[int, int | None]] = Counter()
        for node in graph.nodes:
            done.update((index, replica_of(node)) for index in written_buckets(node))
        for bucket in program.buckets:
            for replica in replicas:
                expected = _expected_updates(program, bucket, replica, graph)
                if done[(bucket.index, replica)] != expected:
                    yield Violation(
                        f"bucket {bucket.index} is updated {done[(bucket.index, replica)]} times on {where(replica)}, "
                        f"not {expected}",
                        last_of_bucket(graph, bucket.index, replica),
                    )
        for node in calls_to(graph, *ops.UPDATES):
            if node.target is ops.step_optimizer and replica_at(program, node) != 0:
                yield Violation(
                    f"{node.name} is on replica {replica_at(program, node)}, but the optimizer is replica 0's", node
                )
            for index, source in zip(written_buckets(node), node.args, strict=False):
                assert isinstance(source, fx.Node), "operations_have_their_arguments holds"
                if not _is_for(program, node, index, parts.of(source)):
                    what = (
                        "is not its new parameters" if node.target is ops.store else "is not its sum over all replicas"
                    )
                    yield Violation(f"bucket {index} is updated from {source}, which {what}", node)


def _is_for(program: Program, node: fx.Node, index: int, given: Part | None) -> bool:
    """Whether a value is what an update (a store) of a bucket needs: its sum (its parameters, from the one that made them)."""
    if given is None:
        return False
    bucket = program.buckets[index]
    if node.target is ops.store:
        return given.holds(PARAMETERS, index, 0, bucket.num_elements)
    share = bucket.share(
        replica_at(program, node), program.num_replicas
    )  # or the whole: `reductions_fit_the_placement`
    return any(
        given.holds(GRADIENTS, index, *e, range(program.num_replicas)) for e in ((0, bucket.num_elements), share)
    )


def _expected_updates(program: Program, bucket: Bucket, replica: int | None, graph: fx.Graph) -> int:
    if bucket.placement is Placement.MIRRORED:
        return 1
    if replica is None:
        replica = place_of(program, graph)
    if not bucket.rule.elementwise:
        return int(replica == 0)
    start, stop = bucket.share(replica, program.num_replicas)
    return int(start < stop)


def reductions_fit_the_placement(program: Program) -> Iterator[Violation]:
    """Shared parameters that are updated element by element get shares of the sum, all others the whole sum."""
    for _, graph, _ in scopes(program):
        for node in calls_to(graph, *ops.REDUCTIONS):
            bucket = program.buckets[bucket_of(node)]
            by_shares = bucket.placement is Placement.SHARED and bucket.rule.elementwise
            if (node.target is ops.reduce_scatter) != by_shares:
                yield Violation(f"{say(node)} does not fit its parameters, which are {bucket.placement.value}", node)


def variables_are_written_after_reads(program: Program) -> Iterator[Violation]:
    """A replica writes a variable after every region of its own that reads it, or a view of it."""
    for where, graph, replicas in scopes(program):
        for replica in replicas:
            written: set[str] = set()
            for node in graph.nodes:
                if replica_of(node) != replica:
                    continue
                if node.target is ops.write:
                    written.add(str(node.kwargs["variable"]))
                for index in written_buckets(node):
                    written.update(slot.variable for slot in program.buckets[index].slots)
                if written and (is_region_call(node) or is_compute(node)):
                    early = sorted(written & {_variable_of(program, source) for source in node.all_input_nodes})
                    if early:
                        yield Violation(f"{early[0]} is written on {where(replica)} before {node.name} reads it", node)


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def _variable_of(program: Program, node: fx.Node) -> str:
    """The variable that a value is, or is a view of; empty if it is a value of its own."""
    while node.target is operator.getitem:
        call = node.args[0]
        assert isinstance(call, fx.Node)
        if not is_region_call(call):
            return ""
        body = program.regions[region_of(call)].graph_module.graph
        value: Any = body.output_node().args[0][node.args[1]]  # type: ignore[index]
        while _is_view(value.target):
            value = value.args[0]
        if value.op != "placeholder":
            return ""
        given = call.args[[n for n in body.nodes if n.op == "placeholder"].index(value)]
        assert isinstance(given, fx.Node)
        node = given
    return str(node.kwargs["variable"]) if node.target is ops.read else ""


def shared_parameters_are_written_last(program: Program) -> Iterator[Violation]:
    """Before it writes shared parameters, a device has waited for a reduction that all devices launch after their last region."""
    shared = {bucket.index for bucket in program.buckets if bucket.placement is Placement.SHARED}
    if not shared:
        return
    orders = [
        (where(replica), [n for n in graph.nodes if n.target in ops.COLLECTIVES or replica_of(n) == replica])
        for where, graph, replicas in scopes(program)
        for replica in replicas
    ]
    late = set.intersection(*(_launched_after_regions(nodes) for _, nodes in orders))
    for where_name, nodes in orders:
        is_safe = False
        for node in nodes:
            if node.target is ops.wait:
                source = node.args[0]
                is_safe = is_safe or (isinstance(source, fx.Node) and tag(source) in late)
            elif not is_safe and shared.intersection(written_buckets(node)):
                yield Violation(
                    f"{node.name} on {where_name} may write parameters that another device still reads", node
                )


def _launched_after_regions(nodes: list[fx.Node]) -> set[tuple[str, int]]:
    last = max((i for i, n in enumerate(nodes) if is_region_call(n)), default=-1)
    return {tag(node) for node in nodes[last + 1 :] if node.target in ops.REDUCTIONS}
