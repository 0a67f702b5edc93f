"""A ring of sends in place of an all_reduce, written as a pass: what collective algorithms are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program, Stage

aten = torch.ops.aten


@dataclass(frozen=True)
class Ring:
    """Turns each all_reduce over N replicas into 2 (N - 1) rounds, in which each replica sends a chunk to the next one::

        s = all_reduce(p, q, bucket=0, link=copy)    ->    send(p[:n], bucket=0, chunk=0, round=0, destination=1, replica=0)
        w = wait(s, bucket=0, replica=0)                   send(q[n:], bucket=0, chunk=1, round=0, destination=0, replica=1)
        update(w, bucket=0, replica=0)                     r = recv(bucket=0, chunk=1, round=0, source=1, replica=0)
                                                           c = aten.add(p[n:], wait(r, bucket=0, replica=0))
                                                           ...
                                                           update(aten.cat([..., c]), bucket=0, replica=0)

    In the first N - 1 rounds each replica adds its own part to what it receives; in the others whole sums go round.
    """

    name: str = field(default="ring", init=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def run(self, program: Program) -> Program:
        if not any(calls_to(program.mirrored_graph, ops.all_reduce)):
            return program.with_remarks("no ring: there is no all_reduce; share-parameters makes each a reduce_scatter")
        program = program.evolve(graph=copied(program.mirrored_graph))
        for launch in list(calls_to(program.mirrored_graph, ops.all_reduce)):
            _unroll(program, launch)
        return program


def _unroll(program: Program, launch: fx.Node) -> None:
    count, bucket = program.num_replicas, program.buckets[bucket_of(launch)]
    tag: dict[str, Any] = {"bucket": bucket.index, "link": launch.kwargs["link"]}
    cuts = [bucket.num_elements * i // count for i in range(count + 1)]
    chunks = [
        [insert(program, launch, aten.slice.Tensor, (packed, 0, cuts[i], cuts[i + 1])) for i in range(count)]
        for packed in launch.all_input_nodes
    ]
    for number in range(2 * (count - 1)):
        is_adding, moved = number < count - 1, [(replica - number) % count for replica in range(count)]
        for replica, chunk in enumerate(moved):
            ends = {"destination": (replica + 1) % count, "replica": replica, "chunk": chunk, "round": number}
            insert(program, launch, ops.send, (chunks[replica][chunk],), {**tag, **ends})
        for replica in range(count):
            source = (replica - 1) % count
            chunk = moved[source]
            ends = {"source": source, "replica": replica, "chunk": chunk, "round": number}
            receipt = insert(program, launch, ops.recv, (), {**tag, **ends})
            got = insert(program, launch, ops.wait, (receipt,), {"bucket": bucket.index, "replica": replica})
            if is_adding:
                got = insert(program, launch, aten.add.Tensor, (chunks[replica][chunk], got))
            chunks[replica][chunk] = got
    for wait in list(launch.users):
        replica = replica_of(wait)
        assert replica is not None
        wait.replace_all_uses_with(insert(program, launch, aten.cat.default, (chunks[replica],)))
        wait.graph.erase_node(wait)
    launch.graph.erase_node(launch)
