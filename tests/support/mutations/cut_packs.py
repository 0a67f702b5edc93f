"""Mutations of buckets that are cut into packs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.nodes import bucket_of, pack_of, replica_of
from mirrorc.ir.program import Program
from mutations.places import exchanged, next_like, placed_nodes, with_argument, with_bucket, with_keywords, without
from mutations.table import Edit, breaks

_NAMING = (ops.pack, ops.add_accumulated, ops.wait, *ops.REDUCTIONS, *ops.EXCHANGES)


def _with_pack(program: Program, bucket: Bucket, place: int, pack: Pack) -> Program:
    packs = (*bucket.packs[:place], pack, *bucket.packs[place + 1 :])
    return with_bucket(program, bucket.index, packs=packs)


@breaks
def move_the_end_of_a_pack(program: Program) -> Iterator[Edit]:
    """A pack begins later than the one before it ends, or the first later than its bucket; or a pack ends earlier."""
    for bucket in program.buckets:
        for place, pack in enumerate(bucket.packs):
            for moved in (replace(pack, start=pack.start + 1), replace(pack, stop=pack.stop - 1)):
                yield partial(_with_pack, program, bucket, place, moved)


@breaks
def number_a_pack_otherwise(program: Program) -> Iterator[Edit]:
    """A pack has the number of another one, or of none."""
    for bucket in program.buckets:
        for place, pack in enumerate(bucket.packs):
            for number in (pack.number + 1, pack.number + len(program.packs)):
                yield partial(_with_pack, program, bucket, place, replace(pack, number=number))


def _of_packs(program: Program) -> Iterator[fx.Node]:
    for node in placed_nodes(program, *_NAMING):
        if node.kwargs.get("pack") is not None:
            yield node


@breaks
def name_another_pack(program: Program) -> Iterator[Edit]:
    """An operation names another pack of its bucket, or none."""
    for node in _of_packs(program):
        packs = program.buckets[bucket_of(node)].packs
        other = next((pack.number for pack in packs if pack.number != pack_of(node)), len(program.packs))
        yield partial(with_keywords, node, pack=other)
        if pack_of(node) != bucket_of(node):  # which is what no number stands for
            yield partial(with_keywords, node, pack=None)


@breaks
def put_packs_together_in_another_order(program: Program) -> Iterator[Edit]:
    """A bucket is put together of its packs in another order."""
    for node in placed_nodes(program, ops.unpack):
        for place in range(len(node.args) - 1):
            yield partial(setattr, node, "args", exchanged(node.args, place, place + 1))


@breaks
def leave_a_pack_out(program: Program) -> Iterator[Edit]:
    """A bucket is put together of all its packs but one, or of one twice."""
    for node in placed_nodes(program, ops.unpack):
        for place in range(len(node.args)):
            yield partial(setattr, node, "args", without(node.args, place))
            if len(node.args) > 1:
                yield partial(with_argument, node, place, node.args[place - 1])


@breaks
def launch_another_pack(program: Program) -> Iterator[Edit]:
    """What launches a pack is given another one of its length."""
    for node in _of_packs(program):
        for place, given in enumerate(node.all_input_nodes if node.target in ops.LAUNCHES else ()):
            values = [one for one in node.graph.nodes if one.target is given.target and one < node]
            own = [one for one in values if replica_of(one) == replica_of(given) and one.kwargs != given.kwargs]
            other = next_like(given, own)
            if other is not None:
                yield partial(with_argument, node, place, other)
