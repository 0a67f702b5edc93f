"""The base class of compression passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mirrorc.analysis.communication.compressed_sums import num_bytes_sent
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, pack_keywords, pack_of, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import numbered
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class WorkerCompression:
    """The base class of passes that replace exchanges of whole sums by compressed ones.

    Needs: the exchanges of reduce-over-workers, not yet sharded or linked.
    Guarantees: each wait returns the sum of the workers' messages in the bucket's dtype.
    """

    name: str = field(default="", init=False, repr=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False, repr=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False, repr=False)
    changes_bits: str = field(default="", init=False, repr=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    establishes: ClassVar = (Property.COMPRESSED,)
    precedes: ClassVar = Property.COMPRESSED.and_later
    does: ClassVar[str]
    """A verb for error messages."""

    def applies_to(self, program: Program, launch: fx.Node) -> bool:
        raise NotImplementedError

    def replace(self, program: Program, launch: fx.Node) -> fx.Node:
        """Returns the new launch."""
        raise NotImplementedError

    def remarks(self, program: Program, new: Sequence[fx.Node], before: int) -> list[str]:
        raise NotImplementedError

    def run(self, program: Program) -> Program:
        if not program.workers.are_several:
            return program.with_remarks("nothing is compressed: there is one worker, and nothing is sent to others")
        if Property.EXCHANGED not in program.properties:
            raise problem(
                PassError,
                f"MC4003: pass {self.name!r} must come after 'reduce-over-workers', and does not",
                f"it {self.does} what that pass sends to other workers",
                "mirrorc.after('reduce-over-workers', ...)",
            )
        graph, properties = copied(program.mirrored_graph), (*program.properties, Property.COMPRESSED)
        program = program.evolve(graph=graph, properties=properties)
        launches = list(calls_to(program.mirrored_graph, ops.exchange))
        chosen = [launch for launch in launches if self.applies_to(program, launch)]
        before = sum(num_bytes_sent(program, launch) for launch in chosen)
        new = [self.replace(program, launch) for launch in chosen]
        return program.with_remarks(*self.remarks(program, new, before))


def send_part(program: Program, launch: fx.Node, operation: Any, words: dict[str, Any]) -> fx.Node:
    """Replaces an exchange by ``operation``, which sends a part of each sum. The residual is first added to the sum."""
    of_pack = pack_keywords(*program.packs[pack_of(launch)])
    totals = tuple(
        insert(program, launch, ops.add_unsent, (local_sum,), {**of_pack, "replica": replica_of(local_sum)})
        for local_sum in launch.all_input_nodes
    )
    new = insert(program, launch, operation, totals, {**words, **of_pack, "op": launch.kwargs["op"]})
    launch.replace_all_uses_with(new)
    program.mirrored_graph.erase_node(launch)
    for wait in new.users:
        set_type(program, wait)
    return new


def ring_bytes_text(program: Program, num_bytes: int) -> str:
    number = program.workers.num_workers
    return size_text(round(2 * num_bytes * (number - 1) / number))


def other_buckets_text(program: Program, new: Sequence[fx.Node]) -> str:
    others = sorted({bucket.index for bucket in program.buckets} - {bucket_of(launch) for launch in new})
    return numbered("bucket", others) if others else ""
