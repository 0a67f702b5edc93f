"""Rules on collectives."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, PARAMETERS, BucketParts, Part
from mirrorc.analysis.buckets.slots_of_values import packed_slots, slot_arguments
from mirrorc.analysis.graph.aliases import origins
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack, are_cut
from mirrorc.ir.links import Span, check_link, link_named
from mirrorc.ir.nodes import bucket_of, calls_to, is_compute, is_region_call, origin_of, pack_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.torch_internals import writes_argument
from mirrorc.verifier.rules.rule import (
    Order,
    Violation,
    calls,
    last_of_bucket,
    rule,
    say,
    say_pack,
    scopes,
    written_buckets,
)


@rule(since=Stage.REDUCED)
def collectives_are_waited_for_once(program: Program) -> Iterator[Violation]:
    """Each participating replica waits for a pending value exactly once, with the launch's tag. Nothing else uses the
    value.
    """
    for where, graph, replicas in scopes(program):
        for node in calls_to(graph, *ops.LAUNCHES):
            waits = Counter(replica_of(user) for user in node.users if user.target is ops.wait)
            for replica in [replica_of(node)] if node.target is ops.recv else replicas:
                if waits[replica] != 1:
                    yield Violation(f"{say(node)} is waited for {waits[replica]} times on {where(replica)}", node)
            for user in node.users:
                if user.target is not ops.wait:
                    yield Violation(f"{say(node)} is in flight but used by {user.name}; wait for it first", user)
                elif (bucket_of(user), pack_of(user)) != (bucket_of(node), pack_of(node)):
                    other = say(user).removeprefix("wait of ")
                    yield Violation(f"{say(node)} is waited for as {other}", user)
        for node in calls_to(graph, ops.wait):
            if not isinstance(node.args[0], fx.Node) or node.args[0].target not in ops.LAUNCHES:
                yield Violation(f"{node.name} waits for {node.args[0]}, which is not in flight", node)


@rule(since=Stage.REDUCED)
def buckets_in_flight_are_not_used(program: Program) -> Iterator[Violation]:
    """A packed bucket, and values computed from it before its reduction, are used only by the reduction."""
    for _, node in calls(program, *ops.REDUCTIONS, ops.gather_factors):
        for operand in node.all_input_nodes:
            packed = origin_of(operand)
            pack = (bucket_of(node), node.kwargs.get("pack"))
            if packed.target is not ops.pack or (packed.kwargs.get("bucket"), packed.kwargs.get("pack")) != pack:
                yield Violation(f"{say(node)} is given {operand.name}, which is another bucket", node)
            way = list(_way(packed, operand))
            for user in (user for value in way for user in value.users if user is not node and user not in way):
                yield Violation(f"bucket {bucket_of(node)} is in flight but used by {user.name}", user)


def _way(packed: fx.Node, operand: fx.Node) -> Iterator[fx.Node]:
    while True:
        yield operand
        if operand is packed:
            return
        source = operand.args[0]
        assert isinstance(source, fx.Node)
        operand = source


@rule(since=Stage.REDUCED)
def nothing_is_written_in_flight(program: Program) -> Iterator[Violation]:
    """After a `pack`, no region of its replica writes into its slots. After a `send`, nothing writes the sent value."""
    parts = BucketParts(program)
    for where, graph, replicas in scopes(program):
        closed: dict[tuple[int | None, str], str] = {}  # by replica and slot, the node after which no write may come
        sent: dict[tuple[int | None, _Memory], str] = {}
        for node in graph.nodes:
            if node.op == "placeholder" or node.target is operator.getitem:
                continue
            if node.target is ops.pack:
                for packed_slot in packed_slots(program, node):
                    closed[replica_of(node), packed_slot.variable] = node.name
            elif closed and is_region_call(node):
                replica = replica_of(node)
                for _, slot in slot_arguments(node):
                    variable = str(slot.kwargs["variable"])
                    if (replica, variable) in closed:
                        yield Violation(
                            f"{node.name} on {where(replica)} writes into bucket {bucket_of(slot)}, which "
                            f"{closed[replica, variable]} has closed",
                            node,
                        )
            if sent:
                for replica in replicas if node.target in ops.REDUCTIONS else [replica_of(node)]:
                    for memory in _written(node):
                        if (replica, memory) in sent:
                            name = memory.name if isinstance(memory, fx.Node) else "the {} of bucket {}".format(*memory)
                            target = f"{name}, which {sent[replica, memory]} still offers"
                            yield Violation(f"{node.name} writes {target}", node)
            if node.target is ops.send:
                for memory in _memory_of(program, parts, node.args[0]):
                    sent[replica_of(node), memory] = node.name


_Memory = tuple[str, int, int] | fx.Node
"""The gradients of a pack, the parameters of a bucket, or the memory of a single value."""


def _memory_of(program: Program, parts: BucketParts, value: Any) -> Iterator[_Memory]:
    for origin in origins(value):
        launch: Any = origin.args[0] if origin.target is ops.wait else None
        # a received value is in the sender's memory, or in its own
        is_elsewhere = launch is not None and launch.target not in ops.REDUCTIONS
        part: Part | None = None if is_compute(origin) or is_elsewhere else parts.of(origin)
        if part is None:
            yield origin
        elif part.kind == PARAMETERS:
            yield PARAMETERS, part.bucket, 0
        else:
            for pack in program.buckets[part.bucket].launch_units:
                if any(span.start < pack.stop and pack.start < span.stop for span in part.spans):
                    yield GRADIENTS, part.bucket, pack.number


def _written(node: fx.Node) -> Iterator[_Memory]:
    """A reduction writes its buckets until its wait."""
    yield from ((PARAMETERS, index, 0) for index in written_buckets(node))
    if node.target in (ops.pack, ops.add_accumulated) or node.target in ops.EXCHANGES or node.target in ops.REDUCTIONS:
        yield GRADIENTS, bucket_of(node), pack_of(node)
    if is_compute(node) and writes_argument(node.target):
        for origin in origins(node.all_input_nodes[0]):
            yield origin
            if origin.target in (ops.pack, ops.wait):
                yield GRADIENTS, bucket_of(origin), pack_of(origin)


@rule(since=Stage.REDUCED)
def collectives_match_their_tags(program: Program) -> Iterator[Violation]:
    """Reductions compute sums. A broadcast or sent value is a part of the bucket in its tag: gradients summed so far,
    each once, or new parameters.
    """
    parts = BucketParts(program)
    for _, graph, _ in scopes(program):
        for node in calls_to(graph, *ops.REDUCTIONS):
            if node.kwargs["op"] != "sum":
                yield Violation(
                    f"{say(node)} has op={node.kwargs['op']}, but gradients are weighted to be summed", node
                )
        for node in calls_to(graph, ops.broadcast, ops.send):
            root = node.kwargs["root"] if node.target is ops.broadcast else replica_at(program, node)
            for source in node.all_input_nodes:
                part = parts.of(source)
                if replica_at(program, source) != root:
                    yield Violation(f"{say(node)} from replica {root}, which does not have {source.name}", node)
                elif part is None or part.bucket != bucket_of(node):
                    yield Violation(
                        f"{say(node)} is given {source.name}, which is no sum of that bucket's gradients, nor its parameters",
                        node,
                    )


@rule(since=Stage.REDUCED)
def all_replicas_take_part(program: Program) -> Iterator[Violation]:
    """A collective of the mirrored graph joins every replica once. Each bucket or pack is reduced once: by a
    collective, by sends, or from the factors of all workers. A program that accumulates gradients reduces none.
    """
    if program.graph is None or (program.num_replicas == 1 and not program.accumulates):
        return
    reduced = Counter(pack_of(node) for node in calls_to(program.graph, *ops.REDUCTIONS))
    # rules on updates check that the sends make the sum
    sent = {pack_of(node) for node in calls_to(program.graph, ops.send)}
    gathered = {pack_of(node) for node in calls_to(program.graph, ops.gather_factors)}
    for bucket, pack in program.packs:
        times, is_sent = reduced[pack.number], pack.number in sent or pack.number in gathered
        if times if program.accumulates else times != 1 and (times or not is_sent):
            place = last_of_bucket(program.graph, bucket.index, 0)
            yield Violation(f"{say_pack(bucket, pack)} is reduced {times} times", place)
    for node in calls_to(program.graph, *ops.REDUCTIONS):  # not broadcasts: only the root has an operand
        joined = [replica_of(n) for n in node.all_input_nodes]
        if joined != list(range(program.num_replicas)):
            yield Violation(f"{say(node)} joins replicas {joined}, not each of {program.num_replicas} once", node)


@rule(since=Stage.LOWERED)
def every_collective_has_a_link(program: Program) -> Iterator[Violation]:
    """Every collective of a lowered program names a link. Broadcasts have become sends and receives."""
    for _, node in calls(program, *ops.COLLECTIVES, ops.send, ops.recv):
        if not node.kwargs.get("link") or node.target is ops.broadcast:
            yield Violation(f"{say(node)} has no link; run 'lower-collectives' before 'lower-devices'", node)


@rule(since=Stage.REDUCED)
def links_join_their_devices(program: Program) -> Iterator[Violation]:
    """A collective's link exists, carries it, and joins the program's devices, or workers with such devices."""
    for _, node in calls(program, *ops.COLLECTIVES, ops.send, ops.recv):
        link = node.kwargs.get("link")
        try:
            spans = Span.WORKERS if node.target in ops.BETWEEN_WORKERS else Span.DEVICES
            check_link(None if link is None else str(link), program.devices, spans)
        except ValueError as error:
            yield Violation(f"{say(node)} cannot go over {link}: {error}", node)
            continue
        carried = ops.send if node.target is ops.recv else node.target
        if link is not None and carried not in link_named(link).carries:
            yield Violation(f"{say(node)} cannot go over {link}, which does not carry it", node)


@rule(since=Stage.CAPTURED)
def packs_make_up_their_buckets(program: Program) -> Iterator[Violation]:
    """Every element of a cut bucket is in exactly one pack, and no pack is empty. If any bucket is cut, all buckets have packs,
    numbered from 0. Buckets sent as factors are not cut.
    """
    for bucket in program.buckets:
        place = 0
        for pack in bucket.packs:
            if pack.start != place or pack.stop <= pack.start:
                yield Violation(
                    f"pack {pack.number} of bucket {bucket.index} has the elements from {pack.start} to {pack.stop}, where the "
                    f"next pack begins at {place}"
                )
            place = pack.stop
        if bucket.packs and place != bucket.num_elements:
            yield Violation(f"the packs of bucket {bucket.index} end at {place}, it has {bucket.num_elements} elements")
        if bucket.is_cut and bucket.is_sent_as_factors:
            yield Violation(f"bucket {bucket.index} is sent as factors, but is cut into {len(bucket.packs)} packs")
    if are_cut(program.buckets):
        numbers = sorted(pack.number for bucket in program.buckets for pack in bucket.packs)
        if numbers != list(range(len(numbers))) or not all(bucket.packs for bucket in program.buckets):
            yield Violation(f"packs have the numbers {numbers}: they are to number the packs of all buckets, each once")


@rule(since=Stage.PACKED, order=Order.OWNERS)  # rules on updates explain the same better, once there are some
def packs_keep_their_order(program: Program) -> Iterator[Violation]:
    """The packed values in the output of the mirrored graph are the packs of all buckets, by number. A cut bucket is
    joined from its own packs, in the order of elements.
    """
    for graph in program.graphs():
        output: Any = graph.output_node().args[0]
        packed = output.get("packed", ()) if isinstance(output, dict) else ()
        for (bucket, pack), values in zip(program.packs, packed, strict=False):
            for value in values:
                yield from _wrong_pack(bucket, pack, value, "the output")
        for node in calls_to(graph, ops.unpack):
            buckets = program.buckets[bucket_of(node) : bucket_of(node) + 1]
            for bucket in buckets:
                for pack, value in zip(bucket.packs, node.args, strict=False):
                    yield from _wrong_pack(bucket, pack, value, node.name)


def _wrong_pack(bucket: Bucket, pack: Pack, value: Any, user: str) -> Iterator[Violation]:
    origin = origin_of(value) if isinstance(value, fx.Node) else None
    number = origin.kwargs.get("pack") if origin is not None else None
    if bucket.packs and number is not None and number != pack.number:
        yield Violation(f"{user} takes {value.name}, of pack {number}, as {say_pack(bucket, pack)}", value)
