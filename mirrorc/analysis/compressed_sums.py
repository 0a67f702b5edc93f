"""Finds what of a pack is sent to other workers in a narrower dtype, where its sums lie, and how many bytes are sent."""

from __future__ import annotations

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import pack_of
from mirrorc.ir.program import Program


def own_elements(program: Program, node: fx.Node, replica: int) -> tuple[int, int]:
    """The elements of its pack that `compress` or `decompress` gives a replica of this worker."""
    bucket, pack = program.packs[pack_of(node)]
    if program.num_replicas > 1 and bucket.reduces_by_shares:
        return bucket.share(replica, program.num_replicas)
    return 0, pack.num_elements


def writes_for_all(program: Program, node: fx.Node, replica: int) -> bool:
    """Whether a replica writes what it has where the worker's replicas have their pack; what all have, the first one writes."""
    bucket, _ = program.packs[pack_of(node)]
    return replica == 0 or bucket.reduces_by_shares


def num_bytes_sent(program: Program, exchange: fx.Node) -> int:
    """The bytes of what an exchange adds up over workers, in the dtype in which it is sent."""
    bucket, pack = program.packs[pack_of(exchange)]
    pending = exchange.meta.get("val")
    dtype = pending.value.dtype if isinstance(pending, ops.Pending) else bucket.dtype
    return pack.num_elements * dtype.itemsize
