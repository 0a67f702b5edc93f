"""Has workers send the largest elements of their sums of gradients alone, which changes numbers; for those who ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.compressed_sums import bytes_of_largest, num_bytes_sent
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of, replica_of, words_of_pack
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.printing.values import size_text
from mirrorc.printing.wording import counted, numbered
from mirrorc.top_k import TopK


@dataclass(frozen=True)
class SendLargest:
    """Has each worker send the largest elements of its sum of a bucket alone, with their places, and keep the rest::

        x_0     = exchange(sum_0, bucket=0, op=sum)           own_0   = add_unsent(sum_0, bucket=0, replica=0)
        commit(early=True, replica=0)                         x_0     = gather_largest(own_0, count=10, bucket=0, op=sum)
        total_0 = wait(x_0, bucket=0, replica=0)        ->    commit(early=True, replica=0)
        update(total_0, bucket=0, replica=0)                  total_0 = wait(x_0, bucket=0, replica=0)
                                                              update(total_0, bucket=0, replica=0)

    A worker's devices add up their gradients first, each its share, and what a worker has accumulated is in that sum. To it is
    added what the worker has not sent in earlier steps. The elements of largest magnitude are sent, and are zero in what is kept
    then; so over all steps each worker sends its gradients' sum but for what it still keeps. Every worker adds up what all have
    sent, in the order of ranks, so all have the same bits. Norms, bounds, checks and the optimizer take that sum. What is not a
    number, or infinite, is larger than all else, so it is sent.

    A bucket, or pack, is sent so where that is fewer bytes than its whole sum; others, and those of complex numbers, are sent
    as they are. So are factors, of which each worker makes its gradients.

    Needs: the exchanges of reduce-over-workers, none of which is dealt out or linked yet.
    Guarantees: what is sent in part has what was not sent before.

    Attributes:
        ratio: see `mirrorc.TopK`.
    """

    ratio: float = 0.01
    name: str = field(default="send-largest", init=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    changes_bits: str = field(default="workers send a part of each gradient, and the rest in later steps", init=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    establishes: ClassVar = (Property.COMPRESSED,)
    precedes: ClassVar = (
        Property.COMPRESSED,
        Property.SHARDED,
        Property.CLIPPED,
        Property.UNSCALED,
        Property.CHECKED,
        Property.LINKED,
    )

    def __post_init__(self) -> None:
        TopK(self.ratio)  # refuses what is no ratio

    def run(self, program: Program) -> Program:
        if not program.workers.are_several:
            return program.with_remarks("nothing is compressed: there is one worker, and nothing is sent to others")
        if Property.EXCHANGED not in program.properties:
            raise PassError(
                "pass 'send-largest' sends a part of what is sent to other workers, and nothing is: 'reduce-over-workers' must "
                "come before it"
            )
        program = program.evolve(
            graph=copied(program.mirrored_graph), properties=(*program.properties, Property.COMPRESSED)
        )
        launches = list(calls_to(program.mirrored_graph, ops.exchange))
        sent_in_part = [launch for launch in launches if self._sends_fewer_bytes(program, launch)]
        before = sum(num_bytes_sent(program, launch) for launch in sent_in_part)
        new = [self._send_part(program, launch) for launch in sent_in_part]
        return program.with_remarks(*self._remarks(program, new, before))

    def bytes_of_sum(self, num_elements: int, dtype: torch.dtype, num_workers: int) -> int:
        """The bytes of a whole sum that would take as long as what is sent of it: of each byte of a whole one a worker sends
        nearly two, and of what all gather each worker's."""
        whole = num_elements * dtype.itemsize
        if not num_elements or not dtype.is_floating_point:
            return whole
        own = bytes_of_largest(TopK(self.ratio).count(num_elements), num_elements, dtype)
        return min(whole, -(-own * num_workers // 2))

    def _sends_fewer_bytes(self, program: Program, launch: fx.Node) -> bool:
        bucket, pack = program.packs[pack_of(launch)]
        sent = self.bytes_of_sum(pack.num_elements, bucket.dtype, program.workers.num_workers)
        return sent < pack.num_elements * bucket.dtype.itemsize

    def _send_part(self, program: Program, launch: fx.Node) -> fx.Node:
        bucket, pack = program.packs[pack_of(launch)]
        words: dict[str, Any] = words_of_pack(bucket, pack)
        own = [
            insert(program, launch, ops.add_unsent, (given,), {**words, "replica": replica_of(given)})
            for given in launch.all_input_nodes
        ]
        count = TopK(self.ratio).count(pack.num_elements)
        new = insert(
            program, launch, ops.gather_largest, tuple(own), {"count": count, **words, "op": launch.kwargs["op"]}
        )
        launch.replace_all_uses_with(new)
        program.mirrored_graph.erase_node(launch)
        for wait in new.users:
            set_type(program, wait)
        return new

    def _remarks(self, program: Program, new: Sequence[fx.Node], before: int) -> list[str]:
        told, number = [], program.workers.num_workers
        if new:
            own = size_text((number - 1) * sum(num_bytes_sent(program, launch) for launch in new))
            without = size_text(round(2 * before * (number - 1) / number))
            told.append(
                f"{counted(len(new), 'exchange')} of the largest elements, {self.ratio:g} of all, which changes numbers: each of "
                f"{number} workers sends {own} in a step, in place of {without}"
            )
        others = sorted({bucket.index for bucket in program.buckets} - {bucket_of(launch) for launch in new})
        if others:
            told.append(
                f"{numbered('bucket', others)} sent whole, or as factors: elements with their places would be no fewer bytes"
            )
        return told
