"""Rules on writes to variables, and their order."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, PARAMETERS, ROWS, BucketParts, Part
from mirrorc.analysis.graph.aliases import ViewedVariables
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to, is_compute, is_early, is_region_call, owners_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import replica_at, replica_of_graph
from mirrorc.verifier.rules.rule import (
    Order,
    Violation,
    calls,
    last_of_bucket,
    losses_of,
    rule,
    say,
    scopes,
    tag,
    writes_variables,
    written_buckets,
)

_COMMIT = ("commit", 0)
_STORES = (ops.store, ops.store_rows)
_WANTED: dict[Any, str] = {
    ops.store: "is not its new parameters",
    ops.store_rows: "is not the new rows of its parameters",
}


@rule(since=Stage.UPDATED)
def every_bucket_is_updated_once(program: Program) -> Iterator[Violation]:
    """Each copy of a bucket's parameters is updated exactly once, element by element, from the reduced bucket. A
    program that accumulates gradients, or leaves them to the user, updates none.
    """
    parts = BucketParts(program)
    for where, graph, replicas in scopes(program):
        done: Counter[tuple[int, int | None]] = Counter()
        for node in calls_to(graph, *ops.UPDATES):
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
                    fault = _WANTED.get(node.target, "is not its sum over all replicas")
                    yield Violation(f"bucket {index} is updated from {source}, which {fault}", node)


def _is_for(program: Program, node: fx.Node, index: int, part: Part | None) -> bool:
    if part is None:
        return False
    bucket = program.buckets[index]
    if node.target in _STORES:
        owners = [bucket.owner] if bucket.has_owner and bucket.owner is not None else None
        kind = PARAMETERS if node.target is ops.store else ROWS
        return part.holds(kind, index, 0, bucket.num_elements, owners)
    # `reductions_fit_the_placement` checks whether it must be a share or the whole
    share = bucket.updated(replica_at(program, node), program.num_replicas)
    elements = [share] if bucket.part is not None else [(0, bucket.num_elements), share]
    return any(part.holds(GRADIENTS, index, *span, program.reduced_replicas) for span in elements)


def _expected_updates(program: Program, bucket: Bucket, replica: int | None, graph: fx.Graph) -> int:
    if not program.updates:
        return 0
    here = replica_of_graph(program, graph) if replica is None else replica
    return int(bucket.is_updated_by(here, program.num_replicas))


@rule(since=Stage.UPDATED, order=Order.OWNERS)
def a_step_commits_once(program: Program) -> Iterator[Violation]:
    """Each replica commits once: after everything that can fail (regions, checks, packs, reductions, exchanges and
    their waits, operators on variables), and before every write of a variable. Only waits for sums over workers may
    follow an early commit. All replicas commit early, or none does; early commits need exchanges between workers.
    """
    variables = ViewedVariables(program)
    yield from _early_alike(program)
    is_awaited = any(is_early(node) for _, node in calls(program, ops.commit))
    for where, graph, replicas in scopes(program):
        commits = Counter(replica_of(node) for node in calls_to(graph, ops.commit))
        for replica in replicas:
            if commits[replica] != 1:
                last = max((n for n in calls_to(graph, ops.commit) if replica_of(n) == replica), default=None)
                yield Violation(f"{where(replica)} commits {commits[replica]} times, not once", last)
        committed: set[int | None] = set()
        owners = owners_of(graph)
        for node in graph.nodes:
            replica = owners.get(node)
            if node.target is ops.commit:
                committed.add(replica)
            elif writes_variables(node) and not committed.issuperset(
                replicas if node.target in ops.COLLECTIVES else [replica]
            ):
                yield Violation(f"{node.name} on {where(replica)} writes variables before the commit", node)
            elif committed and _can_fail(variables, node) and not (is_awaited and _is_sum_over_workers(node)):
                is_of_all = node.target in ops.REDUCTIONS or node.target in ops.EXCHANGES
                early = committed if is_of_all else committed & {replica}
                for other in sorted(early, key=str)[:1]:
                    yield Violation(f"{node.name} on {where(other)} can fail, but comes after the commit", node)


def _early_alike(program: Program) -> Iterator[Violation]:
    commits = [node for _, node in calls(program, ops.commit)]
    early = [node for node in commits if is_early(node)]
    if early and len(early) < len(commits):
        late = next(node for node in commits if not is_early(node))
        yield Violation(f"{early[0].name} is an early commit, and {late.name} is not: replicas commit together", late)
    if early and not any(node for _, node in calls(program, *ops.EXCHANGES)):
        yield Violation(f"{early[0].name} is an early commit, but no sum over workers is in flight", early[0])


def _can_fail(variables: ViewedVariables, node: fx.Node) -> bool:
    if (
        is_region_call(node)
        or node.target in (ops.check, ops.gather, ops.keep, ops.pack)
        or node.target in ops.REDUCTIONS
    ):
        return True
    if node.target in ops.ATTENDED or node.target in ops.EXCHANGES or _is_sum_over_workers(node):
        return True  # another replica or worker may be gone
    return is_compute(node) and any(variables.of(source) for source in node.all_input_nodes)


def _is_sum_over_workers(node: fx.Node) -> bool:
    return any(source.target in ops.EXCHANGES for source in node.all_input_nodes)


@rule(since=Stage.SCHEDULED)
def reductions_fit_the_placement(program: Program) -> Iterator[Violation]:
    """A bucket of shared parameters with an element-wise update is reduced by shares. A bucket with an owner is reduced
    to its owner, any other bucket to all replicas. Rows for a row-wise optimizer are gathered by all replicas.
    """
    for _, node in calls(program, *ops.REDUCTIONS):
        bucket = program.buckets[bucket_of(node)]
        if node.target is ops.all_gather and bucket.rule.takes_rows:
            continue
        are_shares, is_to_owner = node.target in ops.SHARED_OUT, node.target is ops.reduce
        if are_shares != bucket.reduces_by_shares or is_to_owner != bucket.has_owner:
            yield Violation(f"{say(node)} does not fit its parameters, which are {bucket.placement.value.word}", node)
        elif is_to_owner and node.kwargs["root"] != bucket.owner:
            yield Violation(f"{say(node)} goes to replica {node.kwargs['root']}, but {_owner(program, bucket)}", node)


@rule(since=Stage.SCHEDULED)
def owners_update_alone(program: Program) -> Iterator[Violation]:
    """Only the owner of a bucket updates it. All other replicas then store the owner's result."""
    owned = {bucket.index: bucket for bucket in program.buckets if bucket.has_owner}
    if not owned:
        return
    for where, graph, _ in scopes(program):
        done: set[tuple[int, int]] = set()
        for node in calls_to(graph, *ops.UPDATES, ops.updated):
            replica = replica_at(program, node)
            indices = [bucket_of(node)] if node.target is ops.updated else written_buckets(node)
            for bucket in (owned[index] for index in indices if index in owned):
                is_owner = replica == bucket.owner
                if is_owner is (node.target in _STORES):
                    act = "stores a copy of" if is_owner else "updates"
                    yield Violation(
                        f"{node.name} on {where(replica_of(node))} {act} bucket {bucket.index}, but {_owner(program, bucket)}",
                        node,
                    )
                elif node.target is ops.updated and (bucket.index, replica) not in done:
                    yield Violation(
                        f"{node.name} on {where(replica_of(node))} takes the parameters of bucket {bucket.index} before they are "
                        "updated",
                        node,
                    )
                if node.target is not ops.updated:
                    done.add((bucket.index, replica))


def _owner(program: Program, bucket: Bucket) -> str:
    owner = bucket.owner
    is_there = owner is not None and 0 <= owner < program.num_replicas
    return f"its owner is {program.devices[owner]}" if is_there and owner is not None else "it has no owner"


@rule(since=Stage.UPDATED)
def variables_are_written_after_reads(program: Program) -> Iterator[Violation]:
    """A replica writes a variable, or lets other workers write it, only after its own uses of the variable and of views
    of it. Its loss is not a view of a written variable.
    """
    variables = ViewedVariables(program)
    for where, graph, replicas in scopes(program):
        written_by: dict[int | None, set[str]] = {}
        owners = owners_of(graph)
        for node in owners:
            # getitem takes a part without reading its elements
            if node.op == "output" or node.target is operator.getitem:
                continue
            replica = owners[node]
            if replica in written_by:
                used = set().union(*map(variables.of, node.all_input_nodes))
                early = sorted(written_by[replica] & used)
                if early:
                    yield Violation(f"{early[0]} is written on {where(replica)} before {node.name} reads it", node)
            if node.target is ops.write:
                written_by.setdefault(replica, set()).add(str(node.kwargs["variable"]))
            # other workers have updated their parts of it
            of_all = [bucket_of(node)] if node.target is ops.gather_parameters else []
            for index in written_buckets(node) or of_all:
                names = {slot.variable for slot in program.buckets[index].slots}
                for writer in replicas if of_all else [replica]:
                    written_by.setdefault(writer, set()).update(names)
        for loss in losses_of(graph):
            for name in sorted(written_by.get(owners[loss], set()) & variables.of(loss))[:1]:
                yield Violation(
                    f"{name} is written on {where(owners[loss])} before {loss.name}, a view of it, is returned", loss
                )


@rule(since=Stage.SCHEDULED)
def shared_parameters_are_written_last(program: Program) -> Iterator[Violation]:
    """Before a device writes shared parameters, it waits for a reduction that each device launches after its last use of
    variables, or passes an early commit after all these uses. If sends make up the sums, synchronous devices may pass
    any commit.
    """
    shared = {bucket.index for bucket in program.buckets if bucket.is_written_last}
    if not shared:
        return
    orders = []
    for where, graph, replicas in scopes(program):
        owners = owners_of(graph)
        for replica in replicas:
            local_nodes = [node for node, owner in owners.items() if owner == replica or node.target in ops.COLLECTIVES]
            orders.append((where(replica), local_nodes))
    variables = ViewedVariables(program)
    meets = _sums_by_messages(program) and not any(device.is_asynchronous for device in program.devices)
    late = set.intersection(*(_launched_after_uses(variables, nodes, meets) for _, nodes in orders))
    for where_name, nodes in orders:
        is_safe = False
        for node in nodes:
            if node.target is ops.wait:
                source = node.args[0]
                is_safe = is_safe or (isinstance(source, fx.Node) and tag(source) in late)
            elif node.target is ops.commit:
                is_safe = is_safe or _COMMIT in late
            elif not is_safe and shared.intersection(written_buckets(node)):
                yield Violation(
                    f"{node.name} on {where_name} may write parameters that another device still reads", node
                )


def _sums_by_messages(program: Program) -> bool:
    """Sends make up the sum of a bucket, so there is no wait for a reduction."""
    reduced = {bucket_of(node) for _, node in calls(program, *ops.REDUCTIONS, ops.gather_factors)}
    return any(bucket.is_written_last and bucket.index not in reduced for bucket in program.buckets)


def _launched_after_uses(variables: ViewedVariables, nodes: list[fx.Node], meets: bool) -> set[tuple[str, int]]:
    """A device's reductions after its last use of a variable.

    Includes its commit if that is early, or if ``meets``: the commit is then a barrier of all devices.
    """
    last = max((i for i, n in enumerate(nodes) if is_region_call(n)), default=-1)
    for i, node in enumerate(nodes[last + 1 :], last + 1):
        if node.op != "output" and node.target is not operator.getitem:
            is_use = any(variables.of(source) for source in node.all_input_nodes)
            last = i if is_use else last
    late = nodes[last + 1 :]
    launches = {tag(node) for node in late if node.target in ops.REDUCTIONS or node.target is ops.gather_factors}
    commits = any(node.target is ops.commit and (meets or is_early(node)) for node in late)
    return launches | {_COMMIT} if commits else launches
