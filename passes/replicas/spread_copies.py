"""Relays updated buckets between devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.devices import have_shared_memory
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.links import best_link, carrier_of
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.messages.wording import counted

aten = torch.ops.aten


@dataclass(frozen=True)
class SpreadCopies:
    """Splits the broadcast of a large bucket into chunks, each relayed by one device::

        b   = broadcast(new, bucket=0, root=0)           send(new[:n], bucket=0, chunk=0, destination=1, replica=0)
        v   = wait(b, bucket=0, replica=1)               send(new[n:], bucket=0, chunk=1, destination=2, replica=0)
        v_2 = wait(b, bucket=0, replica=2)               c_1 = wait(recv(bucket=0, chunk=0, source=0, replica=1))
        store(v, bucket=0, replica=1)              ->    send(c_1, bucket=0, chunk=0, round=1, destination=2, replica=1)
        store(v_2, bucket=0, replica=2)                  d_1 = wait(recv(bucket=0, chunk=1, round=1, source=2, replica=1))
                                                         store(cat([c_1, d_1]), bucket=0, replica=1)
                                                         (the same on replica 2)

    The owner sends each element once, not once per device.

    Guarantees: each device stores the same values.
    Source: tensorpack's OverrideCachingDevice; van de Geijn (1994).

    Attributes:
        min_elements: smaller buckets keep their broadcast, which has fewer messages.
        within_one_memory: also relay between devices of one memory.
    """

    min_elements: int = 2**16
    within_one_memory: bool = False
    link: str | None = None
    name: str = field(default="spread-copies", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    requires: ClassVar = (Property.PLACED,)
    precedes: ClassVar = Property.LINKED.and_later

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        spread = program.evolve(stage=Stage.SCHEDULED, graph=graph)
        broadcasts = [node for node in calls_to(graph, ops.broadcast) if self._is_large(program, node)]
        if program.num_replicas < 3 or not broadcasts:
            why = "there is no third device" if program.num_replicas < 3 else "no bucket is large enough"
            return spread.with_remarks(f"no copy is passed on: {why}", is_kept=False)
        if have_shared_memory(program.devices) and not self.within_one_memory:
            return spread.with_remarks(
                "no copy is passed on: devices of one memory copy straight from the owner's", is_kept=False
            )
        link = carrier_of(self.link or best_link(program.devices)[0], ops.send)
        for broadcast in broadcasts:
            _pass_on(spread, broadcast, link)
        number = program.num_replicas - 1
        return spread.with_remarks(
            f"{counted(len(broadcasts), 'bucket')} of {self.min_elements} elements or more "
            f"{'is' if len(broadcasts) == 1 else 'are'} copied in {number} chunks, each of which one device gets from the owner "
            "and passes on; smaller ones come from their owners"
        )

    def _is_large(self, program: Program, broadcast: fx.Node) -> bool:
        bucket = program.buckets[bucket_of(broadcast)]
        if broadcast.all_input_nodes[0].target is ops.updated_rows:
            return False  # their number is known only at run time
        return bucket.num_elements >= max(self.min_elements, program.num_replicas - 1)


def _pass_on(program: Program, broadcast: fx.Node, link: str) -> None:
    index, root = bucket_of(broadcast), broadcast.kwargs["root"]
    (new,) = broadcast.all_input_nodes
    others = [replica for replica in range(program.num_replicas) if replica != root]
    bounds = [program.buckets[index].num_elements * i // len(others) for i in range(len(others) + 1)]
    tag: dict[str, Any] = {"bucket": index, "link": link}
    waits = {replica_of(node): node for node in broadcast.users}
    first = min(node for replica, node in waits.items() if replica != root)
    chunks: dict[tuple[int, int], fx.Node] = {}  # by the replica that has it, and its number
    for number, replica in enumerate(others):
        part = insert(program, broadcast, aten.slice.Tensor, (new, 0, bounds[number], bounds[number + 1]))
        ends = {"destination": replica, "replica": root, "chunk": number}
        insert(program, broadcast, ops.send, (part,), tag | ends)
    for number, replica in enumerate(others):
        chunk = _received(program, first, tag, {"source": root, "replica": replica, "chunk": number})
        chunks[replica, number] = chunk
        for other in others:
            if other != replica:
                insert(
                    program,
                    first,
                    ops.send,
                    (chunk,),
                    tag | {"destination": other, "replica": replica, "chunk": number, "round": 1},
                )
    for replica in others:
        for number, source in enumerate(others):
            if source != replica:
                ends = {"source": source, "replica": replica, "chunk": number, "round": 1}
                chunks[replica, number] = _received(program, waits[replica], tag, ends)
        whole = [chunks[replica, number] for number in range(len(others))]
        waits[replica].replace_all_uses_with(insert(program, waits[replica], aten.cat.default, (whole,)))
    for wait in waits.values():
        wait.graph.erase_node(wait)
    broadcast.graph.erase_node(broadcast)


def _received(program: Program, before: fx.Node, tag: dict[str, Any], ends: dict[str, Any]) -> fx.Node:
    receipt = insert(program, before, ops.recv, (), tag | ends)
    words = {"bucket": tag["bucket"], "replica": ends["replica"]}
    return insert(program, before, ops.wait, (receipt,), words)
