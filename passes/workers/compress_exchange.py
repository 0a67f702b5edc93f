"""Exchanges gradient sums in a narrower dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import fx

from mirrorc.analysis.communication.compressed_sums import num_bytes_sent
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.nodes import bucket_of, pack_keywords, pack_of, replica_of
from mirrorc.ir.program import Program
from mirrorc.ir.type_inference import set_type
from mirrorc.messages.wording import counted
from mirrorc.passes.workers.worker_compression import WorkerCompression, other_buckets_text, ring_bytes_text

NARROW = MappingProxyType({"bfloat16": torch.bfloat16, "float16": torch.float16})
"""Narrower dtypes for sums, by name."""


@dataclass(frozen=True)
class CompressExchange(WorkerCompression):
    """Rounds workers' sums to a narrower dtype for the all-reduce::

        x_0     = exchange(sum_0, bucket=0, op=sum)           c_0     = compress(sum_0, dtype=torch.bfloat16, bucket=0, replica=0)
        commit(early=True, replica=0)                         x_0     = exchange(c_0, bucket=0, op=sum)
        total_0 = wait(x_0, bucket=0, replica=0)        ->    commit(early=True, replica=0)
        update(total_0, bucket=0, replica=0)                  half_0  = wait(x_0, bucket=0, replica=0)
                                                              total_0 = decompress(half_0, bucket=0, replica=0)
                                                              update(total_0, bucket=0, replica=0)

    A gradient is rounded on its worker, and again in each addition over workers. All workers get the same bits. Numbers
    outside the narrower range become infinite. Factors, and buckets of complex or narrow dtypes, stay as they are.

    Attributes:
        dtype: "bfloat16" (8 bits of precision, the range of float32) or "float16" (11 bits, up to 65504).
    """

    dtype: str = "bfloat16"
    name: str = field(default="compress-exchange", init=False, repr=False)
    changes_bits: str = field(default="sums are rounded on their way to other workers", init=False, repr=False)
    does: ClassVar = "compresses"

    def __post_init__(self) -> None:
        if self.dtype not in NARROW:
            raise ValueError(f"MC1002: dtype is {self.dtype!r}: say {' or '.join(map(repr, NARROW))}")

    def narrows(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > NARROW[self.dtype].itemsize

    def applies_to(self, program: Program, launch: fx.Node) -> bool:
        return self.narrows(program.buckets[bucket_of(launch)].dtype)

    def replace(self, program: Program, launch: fx.Node) -> fx.Node:
        words = pack_keywords(*program.packs[pack_of(launch)])
        launch.args = tuple(
            insert(
                program,
                launch,
                ops.compress,
                (local_sum,),
                {"dtype": NARROW[self.dtype], **words, "replica": replica_of(local_sum)},
            )
            for local_sum in launch.all_input_nodes
        )
        set_type(program, launch)
        for wait in list(launch.users):
            set_type(program, wait)
            users = list(wait.users)  # none, where a device has no share, or another one runs the optimizer
            if users:
                total = insert(program, wait.next, ops.decompress, (wait,), {**words, "replica": replica_of(wait)})
                for user in users:
                    user.replace_input_with(wait, total)
        return launch

    def remarks(self, program: Program, new: Sequence[fx.Node], before: int) -> list[str]:
        remarks = []
        if new:
            number, after = program.workers.num_workers, sum(num_bytes_sent(program, launch) for launch in new)
            remarks.append(
                f"{counted(len(new), 'exchange')} in {self.dtype}, which changes numbers: each of {number} workers sends "
                f"{ring_bytes_text(program, after)} in a step, in place of {ring_bytes_text(program, before)}"
            )
        if self.dtype == "float16" and new:
            remarks.append(
                "a sum beyond 65504 becomes infinite in float16: check_finite= or a scaler notices it; bfloat16 has the range of "
                "float32"
            )
        if others := other_buckets_text(program, new):
            remarks.append(f"{others} not compressed: sent as factors, or {self.dtype} is not narrower than the dtype")
        return remarks
