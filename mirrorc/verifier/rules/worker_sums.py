"""Rules on exchanges between workers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts
from mirrorc.analysis.gradients.sent_factors import packed_factors
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.ir.type_rules import gives_shares
from mirrorc.verifier.rules.rule import Order, Violation, calls, last_of_bucket, rule, say, scopes


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def a_program_belongs_to_a_worker(program: Program) -> Iterator[Violation]:
    """A program of several workers belongs to one worker, and has as many devices as that worker. Each worker has at
    least one device.
    """
    workers = program.workers
    if not workers.devices_per_worker and not workers.rank:
        return
    if not 0 <= workers.rank < len(workers.devices_per_worker):
        yield Violation(f"it is the program of worker {workers.rank}, but there are {workers.num_workers} workers")
    elif workers.devices_per_worker[workers.rank] != program.num_replicas:
        number = workers.devices_per_worker[workers.rank]
        yield Violation(f"worker {workers.rank} has {number} devices, but its program has {program.num_replicas}")
    if any(number < 1 for number in workers.devices_per_worker):
        yield Violation(f"the workers have {workers.devices_per_worker} devices: each needs one")


@rule(since=Stage.SCHEDULED)
def buckets_are_exchanged_in_the_order_of_the_plan(program: Program) -> Iterator[Violation]:
    """A worker exchanges each bucket or pack once, in the order of the plan. All workers share the plan, so no two
    deadlock. Without other workers, or without updates, nothing is exchanged.
    """
    is_exchanged = Property.EXCHANGED in program.properties or program.stage is Stage.LOWERED
    updates = program.workers.are_several and program.trains and not program.accumulates
    wanted = [pack.number for _, pack in program.packs] if updates and is_exchanged else []
    unit = "pack" if are_cut(program.buckets) else "bucket"
    for where, graph, _ in scopes(program):
        launches = list(calls_to(graph, *ops.EXCHANGES))
        numbers = [pack_of(node) for node in launches]
        if numbers == wanted:
            continue
        place = where(None) if program.graph is None else "the mirrored graph"
        if sorted(numbers) == wanted:
            late = next(node for node, number in zip(launches, wanted, strict=True) if pack_of(node) != number)
            message = f"{place} exchanges the {unit}s in the order {numbers}: another worker would wait for another one, forever"
            yield Violation(message, late)
            continue
        for number in sorted({*numbers, *wanted}):
            times, expected = numbers.count(number), wanted.count(number)
            if times != expected:
                remedy = "; run 'reduce-over-workers'" if not numbers else ""
                bucket = program.packs[number][0].index if number < len(program.packs) else number
                at = last_of_bucket(graph, bucket, None if program.graph is None else 0)
                yield Violation(f"{place} exchanges {unit} {number} {times} times, not {expected}{remedy}", at)


@rule(since=Stage.SCHEDULED)
def workers_exchange_their_sums(program: Program) -> Iterator[Violation]:
    """An exchange takes each replica's part of its worker's sum of the bucket: its share, or the whole sum on a
    worker's only device. Nothing else uses this value.
    """
    parts = BucketParts(program)
    for where, graph, replicas in scopes(program):
        for node in calls_to(graph, *ops.EXCHANGES):
            is_gathered = program.buckets[bucket_of(node)].is_sent_as_factors
            if (node.target is ops.gather_factors) != is_gathered:
                sent = "factors" if is_gathered else "sums"
                yield Violation(f"{say(node)} is of a bucket that all workers send as {sent}", node)
            if node.kwargs["op"] != "sum":
                yield Violation(
                    f"{say(node)} has op={node.kwargs['op']}, but gradients are weighted to be summed", node
                )
            owners = [replica_of(source) for source in node.all_input_nodes]
            if owners != replicas:
                yield Violation(f"{say(node)} joins replicas {owners}, not each of {program.num_replicas} once", node)
            for source in node.all_input_nodes if node.target in ops.EXCHANGES_OF_SUMS else ():
                yield from _offered(program, parts, node, source, where(replica_of(source)))


@rule(since=Stage.SCHEDULED)
def workers_send_their_factors(program: Program) -> Iterator[Violation]:
    """A gather of factors takes each replica's own packed bucket, with all gradients left as the factors that all
    workers send. A replica without examples packs none.
    """
    for where, node in calls(program, ops.gather_factors):
        sent = program.buckets[bucket_of(node)].sent_factors
        for source in node.all_input_nodes:
            place = f"{say(node)} is given {source.name} on {where(replica_of(source))}"
            if source.target is not ops.pack or bucket_of(source) != bucket_of(node):
                yield Violation(f"{place}, which is not that bucket as it was packed", node)
                continue
            for gradient, factors in zip(source.all_input_nodes, sent, strict=False):
                if gradient.target not in ops.FACTORED or packed_factors(gradient) != factors:
                    yield Violation(f"{place}, in which {gradient.name} is not left as the factors that are sent", node)


def _offered(program: Program, parts: BucketParts, node: fx.Node, source: fx.Node, where: str) -> Iterator[Violation]:
    bucket, part = program.buckets[bucket_of(node)], parts.of(source)
    pack = next((pack for pack in bucket.launch_units if pack.number == pack_of(node)), None)
    start, stop = (pack.start, pack.stop) if pack is not None else (0, 0)
    if gives_shares(program, node):
        start, stop = bucket.share(replica_at(program, source), program.num_replicas)
    is_of_bucket = part is not None and (part.kind, part.bucket) == (GRADIENTS, bucket.index)
    is_sum = (
        is_of_bucket and part is not None and part.holds(GRADIENTS, bucket.index, start, stop, program.local_replicas)
    )
    if not is_sum and (start < stop or not is_of_bucket):  # an empty share holds nothing
        yield Violation(
            f"{say(node)} is given {source.name} on {where}, which is not what it has of this worker's sum", node
        )
    for user in source.users:
        if user is not node:
            yield Violation(
                f"{source.name} is in flight to other workers but used by {user.name}; wait for {node.name}", user
            )
