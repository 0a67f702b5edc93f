"""Exchanges the largest elements of gradient sums (top-k)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from mirrorc.analysis.communication.compressed_sums import bytes_of_largest, num_bytes_sent
from mirrorc.compression import TopK
from mirrorc.ir import ops
from mirrorc.ir.nodes import pack_of
from mirrorc.ir.program import Program
from mirrorc.messages.wording import counted
from mirrorc.passes.workers.worker_compression import WorkerCompression, other_buckets_text, ring_bytes_text, send_part
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class SendLargest(WorkerCompression):
    """Sends only the largest elements of each worker's sum, with their indices::

        x_0     = exchange(sum_0, bucket=0, op=sum)           own_0   = add_unsent(sum_0, bucket=0, replica=0)
        commit(early=True, replica=0)                         x_0     = gather_largest(own_0, count=10, bucket=0, op=sum)
        total_0 = wait(x_0, bucket=0, replica=0)        ->    commit(early=True, replica=0)
        update(total_0, bucket=0, replica=0)                  total_0 = wait(x_0, bucket=0, replica=0)
                                                              update(total_0, bucket=0, replica=0)

    The other elements are the residual, added to the next step's sum. All workers add in the order of ranks, so they
    get the same bits. NaN and infinities count as largest. Buckets that would not shrink are sent whole.
    """

    ratio: float = 0.01
    name: str = field(default="send-largest", init=False, repr=False)
    changes_bits: str = field(
        default="workers send a part of each gradient, and the rest in later steps", init=False, repr=False
    )
    does: ClassVar = "sends a part of"

    def __post_init__(self) -> None:
        TopK(self.ratio)  # refuses numbers out of range

    def bytes_of_sum(self, num_elements: int, dtype: torch.dtype, num_workers: int) -> int:
        """The bytes of a sum whose ring all-reduce would send as much as this pass."""
        whole = num_elements * dtype.itemsize
        if not num_elements or not dtype.is_floating_point:
            return whole
        largest = bytes_of_largest(TopK(self.ratio).count(num_elements), num_elements, dtype)
        return min(whole, -(-largest * num_workers // 2))

    def applies_to(self, program: Program, launch: fx.Node) -> bool:
        bucket, pack = program.packs[pack_of(launch)]
        sent = self.bytes_of_sum(pack.num_elements, bucket.dtype, program.workers.num_workers)
        return sent < pack.num_elements * bucket.dtype.itemsize

    def replace(self, program: Program, launch: fx.Node) -> fx.Node:
        _, pack = program.packs[pack_of(launch)]
        return send_part(program, launch, ops.gather_largest, {"count": TopK(self.ratio).count(pack.num_elements)})

    def remarks(self, program: Program, new: Sequence[fx.Node], before: int) -> list[str]:
        remarks, number = [], program.workers.num_workers
        if new:
            sent = size_text((number - 1) * sum(num_bytes_sent(program, launch) for launch in new))
            remarks.append(
                f"{counted(len(new), 'exchange')} of the largest elements, {self.ratio:g} of all, which changes numbers: each of "
                f"{number} workers sends {sent} in a step, in place of {ring_bytes_text(program, before)}"
            )
        if others := other_buckets_text(program, new):
            remarks.append(f"{others} sent whole, or as factors: elements with their places would be no fewer bytes")
        return remarks
