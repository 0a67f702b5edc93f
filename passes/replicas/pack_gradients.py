"""Packs gradients into their buckets, on every replica."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack, are_cut
from mirrorc.ir.graph_edits import call, copy_into, insert
from mirrorc.ir.nodes import pack_keywords
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.ir.type_rules import any_value
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted


@dataclass(frozen=True)
class PackGradients:
    """Inserts a replica's `pack` of each bucket, right after the bucket's last gradient and the previous pack::

        bwd_0 = call_region(..., region=bwd_0, replica=0)         bwd_0 = call_region(..., region=bwd_0, replica=0)
        g0, g1 = bwd_0[0], bwd_0[1]                         ->    g0, g1 = bwd_0[0], bwd_0[1]
        output {gradients: {w: (g0, ...), b: (g1, ...)}}          pack = pack(g0, g1, bucket=0, replica=0)
                                                                  output {packed: ((pack, ...),)}

    A replica without examples packs zeros, so that it takes part in all collectives::

        (no nodes of replica 1)                             ->    pack_1 = pack(bucket=0, replica=1)

    The step that ends an accumulation first adds the accumulated gradients::

        pack = pack(g0, g1, bucket=0, replica=0)            ->    pack = pack(g0, g1, bucket=0, replica=0)
                                                                  sum  = add_accumulated(pack, bucket=0, replica=0)

    Each pack of a cut bucket is filled right after its last gradient::

        g0 = bwd_0[0]                                       ->    g0 = bwd_0[0]
        g1 = bwd_1[0]                                             b0_pack0 = pack(g0, bucket=0, pack=0, replica=0)
                                                                  g1 = bwd_1[0]
                                                                  b0_pack1 = pack(g0, g1, bucket=0, pack=1, replica=0)

    Guarantees: every gradient is packed at the offset of its slot, and has no other use.
    """

    name: str = field(default="pack-gradients", init=False)
    input_stage: Stage = field(default=Stage.REPLICATED, init=False)
    output_stage: Stage = field(default=Stage.PACKED, init=False)

    def run(self, program: Program) -> Program:
        graph = fx.Graph()
        output = copy_into(graph, program.mirrored_graph)
        for bucket in program.buckets:
            _check_rows(bucket, output["gradients"])
        order = {node: i for i, node in enumerate(graph.nodes)}
        packed = []
        latest: dict[int, fx.Node] = {}  # the last pack of each replica
        for bucket, pack in program.packs:
            replicas = range(program.num_replicas)
            pack_of = {r: _pack(graph, bucket, pack, output["gradients"], r, order, latest) for r in program.present}
            last = max(pack_of.values(), default=None)
            for replica in replicas:
                if replica not in pack_of:
                    last = _pack_zeros(program, graph, bucket, pack, replica, last)
                    pack_of[replica] = last
            if program.accumulation is Accumulation.ENDS:
                for replica, node in pack_of.items():
                    pack_of[replica] = insert(program, node.next, ops.add_accumulated, (node,), dict(node.kwargs))
            packed.append(tuple(pack_of[replica] for replica in replicas))
        graph.output({"losses": output["losses"], "packed": tuple(packed), "writes": output["writes"]})
        packs = f"{counted(len(program.packs), 'pack')} on each of {counted(program.num_replicas, 'replica')}"
        when = "one per bucket, right after the bucket's last gradient"
        when = "each right after the last gradient that lies in it" if are_cut(program.buckets) else when
        remark = f"{packs}, {when}"
        if len(program.present) < program.num_replicas:
            remark += "; those of replicas without examples fill it with zeros"
        if program.accumulation is Accumulation.ENDS:
            program = program.with_remarks(_ADDED)
        return program.evolve(stage=Stage.PACKED, graph=graph).with_remarks(remark, is_kept=False)


def _check_rows(bucket: Bucket, gradients: Any) -> None:
    for slot in bucket.slots if bucket.rule.takes_rows else ():
        if any(gradient is not None and gradient.target is not ops.index_add for gradient in gradients[slot.variable]):
            raise problem(
                PassError,
                f"MC4003: the optimizer needs rows of the gradient of {slot.variable}, and this pipeline makes it dense",
                "'factor-gradients' must run before 'pack-gradients'; mirrorc.Compiler(exact_order=True) leaves it out",
                (
                    "keep 'factor-gradients' in the pipeline, without exact_order=True",
                    "nn.Embedding(..., sparse=False), with an optimizer for dense gradients",
                ),
            )


_ADDED = (
    "each device adds the gradients that it has accumulated since the last update to its own, by their parts of the examples of "
    "all calls; all that follows works with the sum"
)


def _pack(
    graph: fx.Graph,
    bucket: Bucket,
    pack: Pack,
    gradients: Any,
    replica: int,
    order: dict[fx.Node, int],
    latest: dict[int, fx.Node],
) -> fx.Node:
    members = tuple(gradients[slot.variable][replica] for slot in bucket.slots_in(pack))
    last = max(members, key=order.__getitem__)
    place = max(last, latest.get(replica, last))
    with graph.inserting_after(place):
        node = call(graph, ops.pack, members, {**pack_keywords(bucket, pack), "replica": replica})
    _set_type(node, bucket, pack, last.meta["val"])
    latest[replica] = node
    return node


def _pack_zeros(
    program: Program, graph: fx.Graph, bucket: Bucket, pack: Pack, replica: int, last: fx.Node | None
) -> fx.Node:
    with graph.inserting_after(last) if last is not None else contextlib.nullcontext():
        node = call(graph, ops.pack, (), {**pack_keywords(bucket, pack), "replica": replica})
    like = last.meta["val"] if last is not None else any_value(next(iter(program.regions.values())).graph_module.graph)
    _set_type(node, bucket, pack, like)
    return node


def _set_type(node: fx.Node, bucket: Bucket, pack: Pack, like: Any) -> None:
    with like.fake_mode:
        node.meta["val"] = torch.empty(pack.num_elements, dtype=bucket.dtype, device=like.device)
