"""The elements and bytes of packs that workers exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.nodes import pack_of
from mirrorc.ir.program import Program


def local_elements(program: Program, node: fx.Node, replica: int) -> tuple[int, int]:
    """The range that a replica holds of its worker's sum of a pack."""
    bucket, pack = program.packs[pack_of(node)]
    if program.num_replicas > 1 and bucket.reduces_by_shares:
        return bucket.share(replica, program.num_replicas)
    return 0, pack.num_elements


def writes_for_all(program: Program, node: fx.Node, replica: int) -> bool:
    """True if a replica writes into its worker's pack. If reductions are whole, only the first replica does."""
    bucket, _ = program.packs[pack_of(node)]
    return replica == 0 or bucket.reduces_by_shares


def index_dtype(num_elements: int) -> torch.dtype:
    return torch.int32 if num_elements < 2**31 else torch.int64


def bytes_of_largest(count: int, num_elements: int, dtype: torch.dtype) -> int:
    return count * (dtype.itemsize + index_dtype(num_elements).itemsize)


def gradients_of_pack(bucket: Bucket, pack: Pack, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients that are cut are 1-D."""
    gradients = {}
    for slot in bucket.slots:
        start, stop = max(slot.offset, pack.start), min(slot.offset + slot.num_elements, pack.stop)
        piece = flat[start - pack.start : stop - pack.start] if start < stop else flat[:0]
        if piece.numel() == slot.num_elements:
            piece = piece.as_strided(slot.shape, slot.strides)
        if piece.numel():
            gradients[slot.variable] = piece
    return gradients


def num_bytes_sent(program: Program, exchange: fx.Node) -> int:
    if exchange.target is ops.exchange_payload:
        num_bytes: Any = exchange.kwargs["num_bytes"]
        return int(num_bytes)
    bucket, pack = program.packs[pack_of(exchange)]
    if exchange.target is ops.gather_largest:
        count: Any = exchange.kwargs["count"]
        return bytes_of_largest(count, pack.num_elements, bucket.dtype)
    pending = exchange.meta.get("val")
    dtype = pending.value.dtype if isinstance(pending, ops.Pending) else bucket.dtype
    return pack.num_elements * dtype.itemsize
