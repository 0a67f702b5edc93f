"""Inserts one all-reduce per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack, are_cut
from mirrorc.ir.graph_edits import call, copy_into, insert
from mirrorc.ir.nodes import origin_of, pack_keywords
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted


@dataclass(frozen=True)
class InsertAllReduce:
    """Inserts the reduction of each bucket, right after the last replica's `pack`::

        pack   = pack(g0, g1, bucket=0, replica=0)        pack   = pack(g0, g1, bucket=0, replica=0)
        pack_1 = pack(h0, h1, bucket=0, replica=1)  ->    pack_1 = pack(h0, h1, bucket=0, replica=1)
        output {packed: ((pack, pack_1),)}                all_reduce = all_reduce(pack, pack_1, bucket=0, op=sum)
                                                          wait   = wait(all_reduce, bucket=0, replica=0)
                                                          wait_1 = wait(all_reduce, bucket=0, replica=1)
                                                          output {reduced: ((wait, wait_1),)}

    One replica needs no reduction, nor does a program that accumulates gradients.

    Packs of a cut bucket are reduced separately::

        b0_pack0 ...; b0_pack1 ...                  ->    b0_pack0 ...; all_reduce(b0_pack0, ..., bucket=0, pack=0, op=sum)
                                                          b0_pack1 ...; all_reduce(b0_pack1, ..., bucket=0, pack=1, op=sum)
        output {packed: ((b0_pack0, ...), ...)}           unpack = unpack(wait, wait_2, bucket=0, replica=0)
                                                          output {reduced: ((unpack, ...),)}

    Factors, and rows for a row-wise optimizer, have an `all_gather` in place of the `all_reduce`.

    Guarantees: each pack is reduced once; each replica waits once for each pending value.
    """

    name: str = field(default="insert-all-reduce", init=False)
    input_stage: Stage = field(default=Stage.PACKED, init=False)
    output_stage: Stage = field(default=Stage.REDUCED, init=False)

    def run(self, program: Program) -> Program:
        graph = fx.Graph()
        output = copy_into(graph, program.mirrored_graph)
        reduced = packed = output["packed"]
        if program.accumulates:
            reduced = tuple(tuple(map(_without_ways, values)) for values in reduced)
        elif program.num_replicas > 1:
            order = {node: i for i, node in enumerate(graph.nodes)}
            reduced = tuple(_reduce(graph, bucket, pack, packed[pack.number], order) for bucket, pack in program.packs)
        if are_cut(program.buckets):
            reduced = tuple(_unpacked(program, bucket, reduced) for bucket in program.buckets)
        graph.output({"losses": output["losses"], "reduced": reduced, "writes": output["writes"]})
        return program.evolve(stage=Stage.REDUCED, graph=graph).with_remarks(_remark(program), is_kept=False)


def _without_ways(value: fx.Node) -> fx.Node:
    packed = origin_of(value)
    while value is not packed and not value.users:
        source = value.all_input_nodes[0]
        value.graph.erase_node(value)
        value = source
    return packed


def _remark(program: Program) -> str:
    if program.accumulates:
        return "no all-reduce: gradients are accumulated, and reduced once, by the step that updates with them"
    if program.num_replicas == 1:
        return "no all-reduce: one replica has nothing to reduce"
    per = "pack" if are_cut(program.buckets) else "bucket"
    number = sum(bucket.is_gathered for bucket in program.buckets)
    gathers = f" and {counted(number, 'all-gather')} of factors" if number else ""
    return (
        f"{counted(len(program.packs) - number, 'all-reduce')}{gathers}, one per {per}, right after the pack of the last of "
        f"{program.num_replicas} replicas; each replica waits for each once"
    )


def _reduce(
    graph: fx.Graph, bucket: Bucket, pack: Pack, packs: tuple[fx.Node, ...], order: dict[fx.Node, int]
) -> tuple[fx.Node, ...]:
    words = pack_keywords(bucket, pack)
    reduction = ops.all_gather if bucket.is_gathered else ops.all_reduce
    with graph.inserting_after(max(packs, key=order.__getitem__)):
        pending = call(graph, reduction, packs, {**words, "op": "sum"})
    pending.meta["val"] = ops.Pending(packs[0].meta["val"])
    last, waits = pending, []
    for replica, packed in enumerate(packs):
        with graph.inserting_after(last):
            last = call(graph, ops.wait, (pending,), {**words, "replica": replica})
        last.meta["val"] = packed.meta["val"]
        waits.append(last)
    return tuple(waits)


def _unpacked(program: Program, bucket: Bucket, reduced: Sequence[Sequence[fx.Node]]) -> tuple[fx.Node, ...]:
    if not bucket.is_cut:
        return tuple(reduced[bucket.launch_units[0].number])
    unpacked = []
    for replica in range(program.num_replicas):
        packs = tuple(reduced[pack.number][replica] for pack in bucket.packs)
        words = {"bucket": bucket.index, "replica": replica}
        unpacked.append(insert(program, max(packs).next, ops.unpack, packs, words))
    return tuple(unpacked)
