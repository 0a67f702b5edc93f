"""Rules on exchanges between workers: of sums, factors, rows and parts of sums."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, BucketParts
from mirrorc.analysis.gradients.factored_gradients import stays_factored
from mirrorc.analysis.gradients.sent_factors import packed_factors
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.ir.type_rules import gives_shares
from mirrorc.verifier.rules.rule import Order, Violation, calls, last_of_bucket, rule, say, scopes

_TAKE_ROWS = (
    *(ops.all_gather, ops.gather_factors, ops.step_optimizer, ops.add_to_grad),
    *(ops.scale, ops.clip_value, ops.norm, ops.is_finite),  # where one device has all rows
)
_ADDS_WHOLE = (ops.all_reduce, ops.reduce_scatter, *ops.EXCHANGES_OF_SUMS, ops.scatter_sums, ops.add_accumulated)


@rule(since=Stage.PACKED)
def rows_stay_rows(program: Program) -> Iterator[Violation]:
    """For a table with a row-wise optimizer, replicas pack the gradient as rows and indices. These are gathered and never
    summed to a whole gradient, because the optimizer also updates rows with a gradient of zero.
    """
    for where, node in calls(program, ops.pack, *_ADDS_WHOLE):
        if not program.buckets[bucket_of(node)].rule.takes_rows:
            continue
        if node.target is not ops.pack:
            yield Violation(f"{say(node)} adds up a whole gradient, of which the optimizer takes rows", node)
        for user in node.users if node.target is ops.pack else ():
            if user.op != "output" and user.target not in _TAKE_ROWS:
                yield Violation(f"{user.name} takes {node.name} whole, of which the optimizer takes rows", user)
        for gradient in node.all_input_nodes if node.target is ops.pack else ():
            if gradient.target is not ops.index_add or not stays_factored(gradient):
                place = where(replica_of(node))
                yield Violation(
                    f"{node.name} on {place} packs {gradient.name}, which are no rows and indices, of which the optimizer "
                    "takes rows",
                    node,
                )


@rule(since=Stage.REDUCED)
def devices_gather_their_factors(program: Program) -> Iterator[Violation]:
    """A bucket is all-gathered if and only if the plan says so. The all_gather takes each replica's own packed bucket,
    with all gradients left as factors. A replica without examples packs none.
    """
    for where, graph, _ in scopes(program):
        for node in calls_to(graph, *ops.REDUCTIONS):
            if (node.target is ops.all_gather) != program.buckets[bucket_of(node)].is_gathered:
                plan = "added up whole" if node.target is ops.all_gather else "gathered as factors"
                yield Violation(f"{say(node)} is of a bucket that is planned to be {plan}", node)
        for node in calls_to(graph, ops.all_gather):
            for source in node.all_input_nodes:
                place = f"{say(node)} is given {source.name} on {where(replica_of(source))}"
                if source.target is not ops.pack or bucket_of(source) != bucket_of(node):
                    yield Violation(f"{place}, which is not that bucket as it was packed", node)
                elif whole := [gradient for gradient in source.all_input_nodes if not stays_factored(gradient)]:
                    yield Violation(f"{place}, in which {whole[0].name} is not left as factors", node)


@rule(since=Stage.UPDATED)
def stored_rows_are_those_of_the_step(program: Program) -> Iterator[Violation]:
    """Rows may be stored from an update only if the optimizer writes no others. Every replica that stores them has
    gathered the gradient, and so has the rows' indices.
    """
    for where, node in calls(program, ops.updated_rows, ops.store_rows):
        index, (value, gradient) = bucket_of(node), cast("tuple[fx.Node, fx.Node]", node.args)
        here = f"{node.name} on {where(replica_of(node))}"
        if not program.buckets[index].rule.writes_rows:
            yield Violation(f"{here} takes rows for bucket {index}, of which the optimizer may write others", node)
        if node.target is ops.updated_rows:
            step = _step_of(value, index)
            if step is None:
                yield Violation(f"{here} is given {value.name}, which no step has made of bucket {index}", node)
            elif gradient not in step.all_input_nodes:
                yield Violation(f"{here} takes the rows of {gradient.name}, which {step.name} was not given", node)
        elif not _is_gathered(gradient, index):
            yield Violation(
                f"{here} stores the rows of {gradient.name}, which is not gathered for bucket {index}", node
            )


def _step_of(value: fx.Node, index: int) -> fx.Node | None:
    if value.target is not operator.getitem:
        return None
    step, place = value.args
    if not isinstance(step, fx.Node) or step.target is not ops.step_optimizer:
        return None
    return step if step.kwargs["buckets"][place] == index else None  # type: ignore[index]


def _is_gathered(value: fx.Node, index: int) -> bool:
    launch = value.all_input_nodes[0] if value.target is ops.wait and bucket_of(value) == index else None
    return launch is not None and launch.target in (ops.all_gather, ops.gather_factors)


@rule(since=Stage.SCHEDULED)
def compressed_sums_are_decompressed(program: Program) -> Iterator[Violation]:
    """Only the exchange of its bucket or pack uses a compressed sum. All replicas of a worker compress their parts. The
    sum over workers is decompressed before any other use, and nothing else is decompressed.
    """
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
            are_compressed = [source.target is ops.compress for source in node.all_input_nodes]
            if any(are_compressed) and not all(are_compressed):
                odd = node.all_input_nodes[are_compressed.index(False)]
                yield Violation(f"{say(node)} is given {odd.name}, and what other replicas have compressed", node)
            for wait in node.users if any(are_compressed) else ():
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
def parts_include_the_residual(program: Program) -> Iterator[Violation]:
    """If workers exchange parts of their sums, each replica first adds the residual of earlier steps. Only the exchange
    of its bucket or pack uses the result; it keeps the new residual.
    """
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


def _is_total(value: Any) -> bool:
    launch = value.args[0] if isinstance(value, fx.Node) and value.target is ops.wait else None
    return (
        isinstance(launch, fx.Node)
        and launch.target is ops.exchange
        and all(source.target is ops.compress for source in launch.all_input_nodes)
    )


def _tag(node: Any) -> tuple[int, int]:
    return bucket_of(node), pack_of(node)


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
    is_sum = part is not None and part.holds(GRADIENTS, bucket.index, start, stop, program.local_replicas)
    if not is_sum and (start < stop or not is_of_bucket):  # an empty share holds nothing
        yield Violation(
            f"{say(node)} is given {source.name} on {where}, which is not what it has of this worker's sum", node
        )
    for user in source.users:
        if user is not node:
            yield Violation(
                f"{source.name} is in flight to other workers but used by {user.name}; wait for {node.name}", user
            )
