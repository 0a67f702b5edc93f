"""Rules on the packs in which buckets are communicated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack, are_cut
from mirrorc.ir.nodes import bucket_of, calls_to, origin_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.programs import Violation, say_pack
from mirrorc.verifier.rules.rule import Order, rule


@rule(since=Stage.CAPTURED)
def packs_make_up_their_buckets(program: Program) -> Iterator[Violation]:
    """Every element of a bucket that is cut lies in exactly one pack, and no pack is empty. If any bucket is cut, packs number
    all that is communicated, from 0 on; a pack never mixes dtypes, as its bucket has one. What is sent as factors is not cut."""
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
        found = sorted(pack.number for bucket in program.buckets for pack in bucket.packs)
        if found != list(range(len(found))) or not all(bucket.packs for bucket in program.buckets):
            yield Violation(f"packs have the numbers {found}: they are to number the packs of all buckets, each once")


@rule(since=Stage.PACKED, order=Order.OWNERS)  # rules on updates explain the same better, once there are some
def packs_keep_their_order(program: Program) -> Iterator[Violation]:
    """What the output of the mirrored graph names as packed are the packs of all buckets, by their numbers; and a bucket that is
    cut is put together of its own packs, in the order of the elements."""
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
    """What is wrong if a value is of another pack than this one."""
    origin = origin_of(value) if isinstance(value, fx.Node) else None
    number = origin.kwargs.get("pack") if origin is not None else None
    if bucket.packs and number is not None and number != pack.number:
        yield Violation(f"{user} takes {value.name}, of pack {number}, as {say_pack(bucket, pack)}", value)
