"""Assigns links to collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.links import Span, best_link, carrier_of, check_link, link_named
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class LowerCollectives:
    """Assigns a link to every collective::

        all_reduce(pack, pack_1, bucket=0, op=sum)    ->    all_reduce(pack, pack_1, bucket=0, op=sum, link=shared-memory)

        b = broadcast(new, bucket=0, root=0)                send(new, bucket=0, destination=1, replica=0, link=copy)
        wait(b, bucket=0, replica=0)                  ->    r = recv(bucket=0, source=0, replica=1, link=copy)
        v = wait(b, bucket=0, replica=1)                    v = wait(r, bucket=0, replica=1)

    A broadcast becomes sends and receives. Operations that a link does not carry use its fallback. Exchanges between
    workers use the best link between workers.

    Guarantees: every collective has a link that its devices can use.

    Attributes:
        link: one of `mirrorc.ir.links.link_names`; None for the best.
    """

    link: str | None = None
    name: str = field(default="lower-collectives", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    establishes: ClassVar = (Property.LINKED,)

    def __post_init__(self) -> None:
        if self.link is not None:
            link_named(self.link)

    def run(self, program: Program) -> Program:
        link, remark = self._choose(program)
        graph = copied(program.mirrored_graph)
        collectives = list(calls_to(graph, *ops.COLLECTIVES))
        is_exchanged = any(calls_to(graph, *ops.BETWEEN_WORKERS))
        between, why = best_link(program.devices, Span.WORKERS) if is_exchanged else ("", "")
        for node in collectives:
            if node.target is ops.broadcast:
                _lower_broadcast(program, node, carrier_of(link, ops.send))
            else:
                wanted_link = between if node.target in ops.BETWEEN_WORKERS else link
                node.kwargs = {**node.kwargs, "link": carrier_of(wanted_link, node.target)}
        lowered = program.evolve(stage=Stage.SCHEDULED, graph=graph).with_remarks(*_of_whole_buckets(program))
        if not collectives:
            return lowered.with_remarks("no link: there is no collective", is_kept=False)
        if is_exchanged:
            lowered = lowered.with_remarks(why or f"link {between} between workers: the best for these devices")
        if all(node.target in ops.BETWEEN_WORKERS for node in collectives):
            return lowered
        idle = "; nothing moves before the wait, which does all the work: backward hides none of it"
        return lowered.with_remarks(remark + ("" if link_named(link).moves_by_itself else idle))

    def _choose(self, program: Program) -> tuple[str, str]:
        if self.link is not None:
            check_link(self.link, program.devices)
            return self.link, f"link {self.link}: asked for"
        link, why = best_link(program.devices)
        return link, why or f"link {link}: the best for these devices"


def _of_whole_buckets(program: Program) -> list[str]:
    remarks = []
    for node in calls_to(program.mirrored_graph, ops.broadcast):
        bucket = program.buckets[bucket_of(node)]
        if bucket.rule.elementwise or node.all_input_nodes[0].target is ops.updated_rows:
            continue
        others = f"each of {program.num_replicas - 1} other devices" if program.num_replicas > 2 else "the other device"
        rows = ", though the optimizer has rows alone of the gradient" if bucket.rule.takes_rows else ""
        remarks.append(
            f"bucket {bucket.index}: {bucket.rule.label} runs on one device, which sends all new parameters, "
            f"{size_text(bucket.num_bytes)}, to {others} in a step{rows}"
        )
    return remarks


def _lower_broadcast(program: Program, broadcast: fx.Node, link: str) -> None:
    bucket, root = bucket_of(broadcast), broadcast.kwargs["root"]
    for wait in list(broadcast.users):
        replica = replica_of(wait)
        if replica == root:
            wait.graph.erase_node(wait)  # it has no uses, because the root has the values
            continue
        ends = {"bucket": bucket, "link": link}
        insert(program, broadcast, ops.send, broadcast.args, {**ends, "destination": replica, "replica": root})
        received = insert(program, broadcast, ops.recv, (), {**ends, "source": root, "replica": replica})
        wait.args = (received,)
    broadcast.graph.erase_node(broadcast)
