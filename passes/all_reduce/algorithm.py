"""The base class of all-reduce algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mirrorc.analysis.cost.message_costs import MessageCosts, message_costs
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.routes import route_of, sends_in
from mirrorc.messages.wording import counted, numbered
from mirrorc.passes.all_reduce.traffic import Held, Traffic
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class AllReduceAlgorithm:
    """Replaces each sum over replicas by the messages and additions of a subclass::

        s  = all_reduce(p, q, bucket=0, link=copy)       send(q, bucket=0, destination=0, chunk=0, round=0, replica=1)
        ...                                              r  = recv(bucket=0, source=1, chunk=0, round=0, replica=0)
        w  = wait(s, bucket=0, replica=0)                ...
        w1 = wait(s, bucket=0, replica=1)          ->    v  = wait(r, bucket=0, replica=0)
        update(w, bucket=0, replica=0)                   t  = aten.add(p, v)
        update(w1, bucket=0, replica=1)                  send(t, bucket=0, destination=1, chunk=0, round=1, replica=0)
                                                         update(t, bucket=0, replica=0)
                                                         r1 = recv(bucket=0, source=0, chunk=0, round=1, replica=1)
                                                         v1 = wait(r1, bucket=0, replica=1)
                                                         update(v1, bucket=0, replica=1)

    `add_up` leaves each element's sum on some replica; `spread` sends the sums to all replicas. If devices share
    parameters, each gets only its share, and `spread` is not called. All-gathers stay.

    Needs: collectives with links.
    Guarantees: each replica gets the sum or its share, all with the same bits.
    """

    name: str = field(default="", init=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    requires: ClassVar = (Property.LINKED,)
    trains_only: ClassVar = True
    updates_only: ClassVar = True

    @property
    def changes_bits(self) -> str:
        return "replicas' gradients are added up in another order"

    @property
    def sends(self) -> bool:
        """True if messages carry whole gradients."""
        return True

    def objection(self, num_replicas: int) -> str:
        """Why the algorithm cannot be used; empty if it can."""
        return ""

    def chosen_for(self, program: Program, launch: fx.Node) -> tuple[AllReduceAlgorithm, str]:
        """The algorithm for the bucket of ``launch``, and the reason for a choice, or ""."""
        return self, ""

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        """Returns sums on replicas. Together they have each element at least once."""
        raise NotImplementedError

    def spread(self, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        """Returns each replica's whole sum, by replica. By default, replicas with sums send them to all others."""
        return self._collected(traffic, sums)

    def _collected(self, traffic: Traffic, sums: Sequence[Held]) -> list[Held]:
        """All sends come before the first wait."""
        replicas = range(traffic.num_replicas)
        pieces = [traffic.collected(replica, self.seen_by(replica, traffic, sums)) for replica in replicas]
        return [traffic.joined(pieces_of_one) for pieces_of_one in pieces]

    def write_down(self, program: Program, launch: fx.Node, first_round: int) -> None:
        """Replaces ``launch`` and its waits."""
        traffic = Traffic(program, launch, first_round)
        sums = list(self.add_up(traffic))
        if launch.kwargs["op"] == "mean":
            sums = [traffic.divided(held, traffic.num_replicas) for held in sums]
        traffic.next_round()
        traffic.finish(self._collected(traffic, sums) if traffic.by_shares else self.spread(traffic, sums))

    def seen_by(self, replica: int, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        """The sums that a replica may receive, in order of preference."""
        return sums

    def run(self, program: Program) -> Program:
        if why := self.objection(program.num_replicas):
            raise PassError(
                f"MC4003: pass {self.name!r} cannot be used on {counted(program.num_replicas, 'device')}: {why}"
            )
        if not _sums(program):
            return program.with_remarks(f"no {self.name}: no devices sum up gradients here", is_kept=False)
        before, program = program, program.evolve(graph=copied(program.mirrored_graph))
        packs_of: dict[tuple[str, str], list[int]] = {}
        sent: list[int] = []
        begun = _rounds_begun(program)
        for launch in _sums(program):
            index = bucket_of(launch)
            chosen, why = self.chosen_for(program, launch)
            packs_of.setdefault((chosen.name, why), []).append(pack_of(launch))
            if chosen.sends and launch.all_input_nodes[0].meta["val"].numel():
                sent.append(index)
                chosen.write_down(program, launch, begun.get((index, launch.kwargs.get("pack")), 0))
        program = program if sent else before
        noun = "pack" if any(bucket.packs for bucket in program.buckets) else "bucket"
        remarks = [
            f"{name} for {numbered(noun, sorted({*packs}))}" + (f": {why}" if why else "")
            for (name, why), packs in packs_of.items()
        ]
        costs = [self._say_costs(message_costs(program, sent))] if sent else []
        return program.with_remarks(*remarks, *costs)

    def _say_costs(self, costs: MessageCosts) -> str:
        return (
            f"in a step a device sends at most {size_text(max(costs.bytes_sent))} in "
            f"{counted(max(costs.num_messages), 'message')}; the longest chain of a bucket has "
            f"{counted(costs.path_messages, 'message')}, and takes as long as a message of {size_text(costs.path_bytes)}"
        )


def _sums(program: Program) -> list[fx.Node]:
    return [node for node in calls_to(program.mirrored_graph, *ops.REDUCTIONS) if node.target is not ops.all_gather]


def _rounds_begun(program: Program) -> dict[tuple[int, object], int]:
    """The first unused round by bucket and pack; spread-copies may have used rounds to send parameters."""
    rounds: dict[tuple[int, object], int] = {}
    for send in sends_in(program.mirrored_graph):
        route = route_of(program, send)
        summed = (route.bucket, route.pack)
        rounds[summed] = max(rounds.get(summed, 0), route.round + 1)
    return rounds
