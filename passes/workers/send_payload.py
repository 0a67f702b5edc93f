"""Exchanges user-defined payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from mirrorc.analysis.communication.compressed_sums import gradients_of_pack, num_bytes_sent
from mirrorc.compression import Payload, register_payload
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.nodes import pack_of
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.passes.workers.worker_compression import WorkerCompression, other_buckets_text, ring_bytes_text, send_part


@dataclass(frozen=True)
class SendPayload(WorkerCompression):
    """Sends a user-defined payload of each worker's sum::

        x_0     = exchange(sum_0, bucket=0, op=sum)           own_0   = add_unsent(sum_0, bucket=0, replica=0)
        commit(early=True, replica=0)                         x_0     = exchange_payload(own_0, payload=PowerSGD(rank=4),
        total_0 = wait(x_0, bucket=0, replica=0)        ->                num_bytes=3072, bucket=0, op=sum)
        update(total_0, bucket=0, replica=0)                  commit(early=True, replica=0)
                                                              total_0 = wait(x_0, bucket=0, replica=0)
                                                              update(total_0, bucket=0, replica=0)

    The residual of earlier steps is first added to the sum (error feedback). Updates take the result of
    `mirrorc.compression.Payload.exchange`. Factors, and buckets that would not shrink, are sent as before.
    """

    payload: Payload = field(default_factory=Payload)
    name: str = field(default="send-payload", init=False, repr=False)
    changes_bits: str = field(
        default="workers send payloads of gradients, and what these leave out in later steps", init=False, repr=False
    )
    does: ClassVar = "sends payloads of"

    def bytes_of_gradient(self, name: str, gradient: torch.Tensor, num_workers: int) -> int:
        meta = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
        return self._num_bytes({name: meta}, num_workers) or _size(meta)

    def _num_bytes(self, gradients: dict[str, torch.Tensor], num_workers: int) -> int:
        num_bytes = self.payload.num_bytes(gradients, num_workers)
        if not isinstance(num_bytes, int) or num_bytes < 0:
            raise problem(
                PassError,
                f"MC1507: compression={self.payload!r} says that it sends {num_bytes!r} bytes of {', '.join(gradients)}",
                "num_bytes() must return a whole number, 0 for gradients that are sent whole",
                f"return int(...) in {type(self.payload).__name__}.num_bytes()",
            )
        return num_bytes if num_bytes < sum(map(_size, gradients.values())) else 0

    def _bytes_of_pack(self, program: Program, launch: fx.Node) -> int:
        bucket, pack = program.packs[pack_of(launch)]
        flat = torch.empty(pack.num_elements, dtype=bucket.dtype, device="meta")
        return self._num_bytes(gradients_of_pack(bucket, pack, flat), program.workers.num_workers)

    def applies_to(self, program: Program, launch: fx.Node) -> bool:
        return self._bytes_of_pack(program, launch) > 0

    def replace(self, program: Program, launch: fx.Node) -> fx.Node:
        words = {"payload": register_payload(self.payload), "num_bytes": self._bytes_of_pack(program, launch)}
        return send_part(program, launch, ops.exchange_payload, words)

    def remarks(self, program: Program, new: Sequence[fx.Node], before: int) -> list[str]:
        texts = []
        if new:
            after = sum(num_bytes_sent(program, launch) for launch in new)
            texts.append(
                f"{counted(len(new), 'exchange')} of {self.payload!r}, which changes numbers: each of "
                f"{program.workers.num_workers} workers sends {ring_bytes_text(program, after)} in a step, in place of "
                f"{ring_bytes_text(program, before)}"
            )
        if others := other_buckets_text(program, new):
            texts.append(f"{others} sent whole, or as factors: the payload would be no fewer bytes")
        return texts


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
