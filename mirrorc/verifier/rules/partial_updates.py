"""Rules on optimizers sharded over workers, and on updates of a share in parts."""

from __future__ import annotations

from collections.abc import Iterator

from mirrorc.analysis.gradients.tiled_updates import why_not_in_parts
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Elements
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.verifier.rules.rule import Violation, calls, last_of_bucket, rule, say, scopes, written_buckets


@rule(since=Stage.SCHEDULED)
def workers_update_equal_parts_in_their_order(program: Program) -> Iterator[Violation]:
    """If workers shard the optimizer, buckets with element-wise updates have as many equal parts as there are workers,
    and each worker updates the part of its rank. Other buckets have no parts.
    """
    is_due = program.workers.shards_optimizer and _is_sharded(program)
    for bucket in program.buckets:
        wanted, is_missing = _part_of(program, bucket), is_due and bucket.rule.elementwise and bucket.part is None
        if not is_missing and bucket.part in (None, wanted):
            continue
        where = f"bucket {bucket.index} of {bucket.num_elements} elements"
        at = last_of_bucket(program.graphs()[0], bucket.index, None if program.graph is None else 0)
        if bucket.part is None:
            yield Violation(f"{where} has no part of this worker; run 'shard-optimizer'", at)
            continue
        whose = f"elements {bucket.part.start} to {bucket.part.stop} are updated by worker {program.workers.rank}"
        expected = "there are no parts of it" if wanted is None else f"whose are {wanted.start} to {wanted.stop}"
        yield Violation(f"{where}: {whose}, but {expected}", at)


def _is_sharded(program: Program) -> bool:
    is_there = Property.SHARDED in program.properties or program.stage is Stage.LOWERED
    return is_there and program.updates


def _part_of(program: Program, bucket: Bucket) -> Elements | None:
    workers = program.workers
    if not (workers.shards_optimizer and workers.are_several and bucket.rule.elementwise):
        return None
    length, rest = divmod(bucket.num_elements, workers.num_workers)
    return Elements(workers.rank * length, (workers.rank + 1) * length) if not rest else None


@rule(since=Stage.SCHEDULED)
def sums_reach_their_updates(program: Program) -> Iterator[Violation]:
    """A worker gets the sum of the elements that it updates: of its part of the bucket, or of the whole bucket."""
    is_there = _is_sharded(program)
    for _, node in calls(program, *ops.EXCHANGES_OF_SUMS, ops.scatter_sums):
        has_part = program.buckets[bucket_of(node)].part is not None
        if is_there and (node.target is ops.scatter_sums) != has_part:
            gets, updates = ("a part", "all") if not has_part else ("all", "a part")
            yield Violation(
                f"{say(node)} gives a worker {gets} of the sum, but it updates {updates} of the bucket", node
            )


@rule(since=Stage.SCHEDULED)
def new_parameters_are_gathered_once(program: Program) -> Iterator[Violation]:
    """A bucket updated by parts is all-gathered once, after each replica's own update of it. All workers gather in the
    reverse order of the plan. No other bucket is gathered.
    """
    is_there = _is_sharded(program)
    wanted = [bucket.index for bucket in reversed(program.buckets) if bucket.part is not None] if is_there else []
    for where, graph, _ in scopes(program):
        launches = list(calls_to(graph, ops.gather_parameters))
        gathered = [bucket_of(node) for node in launches]
        place = where(None) if program.graph is None else "the mirrored graph"
        for bucket in sorted({*gathered, *wanted}):
            if gathered.count(bucket) != wanted.count(bucket):
                at = last_of_bucket(graph, bucket, None if program.graph is None else 0)
                times = f"{gathered.count(bucket)} times, not {wanted.count(bucket)}"
                yield Violation(f"{place} gathers the parameters of bucket {bucket} {times}", at)
        if sorted(gathered) == sorted(wanted) and gathered != wanted:
            late = next(node for node, bucket in zip(launches, wanted, strict=True) if bucket_of(node) != bucket)
            yield Violation(
                f"{place} gathers parameters in the order {gathered}, not {wanted}: another worker would wait for another bucket",
                late,
            )
        for node in launches:
            updates = [update for update in calls_to(graph, *ops.UPDATES) if bucket_of(node) in written_buckets(update)]
            early = next((update for update in updates if node < update), None)
            if early is not None:
                yield Violation(f"{say(node)} is launched before {early.name}: it would send old parameters", node)


@rule(since=Stage.UPDATED)
def updates_in_parts_take_shares_alone(program: Program) -> Iterator[Violation]:
    """An update in parts takes a share of a bucket with factors. Nothing else uses this share, because it has no gradient
    in memory. A part has at least one element.
    """
    for where, update in calls(program, ops.update):
        number = update.kwargs.get("part_elements")
        if number is None:
            continue
        why = why_not_in_parts(program, update) if isinstance(number, int) and number > 0 else f"{number} are none"
        if why:
            device = where(replica_of(update))
            yield Violation(
                f"{update.name} on {device} is to make its gradient {number} elements at a time, but {why}", update
            )
