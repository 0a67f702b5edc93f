"""Finds what of a pack is sent to other workers in a narrower dtype or in part, where sums lie, and how many bytes are sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Matrix, named_matrices
from mirrorc.ir.nodes import pack_of
from mirrorc.ir.program import Program


def own_elements(program: Program, node: fx.Node, replica: int) -> tuple[int, int]:
    """The elements of its pack that a replica of this worker has of its sum, and so what `compress`, say, gives it."""
    bucket, pack = program.packs[pack_of(node)]
    if program.num_replicas > 1 and bucket.reduces_by_shares:
        return bucket.share(replica, program.num_replicas)
    return 0, pack.num_elements


def writes_for_all(program: Program, node: fx.Node, replica: int) -> bool:
    """Whether a replica writes what it has where the worker's replicas have their pack; what all have, the first one writes."""
    bucket, _ = program.packs[pack_of(node)]
    return replica == 0 or bucket.reduces_by_shares


def index_dtype(num_elements: int) -> torch.dtype:
    """In which the places of elements of a pack are sent."""
    return torch.int32 if num_elements < 2**31 else torch.int64


def bytes_of_largest(count: int, num_elements: int, dtype: torch.dtype) -> int:
    """The bytes of so many elements of a pack, with their places."""
    return count * (dtype.itemsize + index_dtype(num_elements).itemsize)


def low_rank_matrices(program: Program, exchange: fx.Node) -> list[Matrix]:
    """The matrices of which an `exchange_low_rank` sends factors, in the order in which they lie."""
    names: Any = exchange.kwargs["matrices"]
    return named_matrices(*program.packs[pack_of(exchange)], names)


def bytes_of_rounds(program: Program, exchange: fx.Node) -> tuple[int, int]:
    """The bytes of what an `exchange_low_rank` adds up over workers: first the left factors, and all that is sent whole; then the
    right factors."""
    bucket, pack = program.packs[pack_of(exchange)]
    rank: Any = exchange.kwargs["rank"]
    matrices = low_rank_matrices(program, exchange)
    whole = pack.num_elements - sum(one.rows * one.columns for one in matrices)
    left, right = (rank * sum(sides) for sides in ([one.rows for one in matrices], [one.columns for one in matrices]))
    return (whole + left) * bucket.dtype.itemsize, right * bucket.dtype.itemsize


def num_bytes_sent(program: Program, exchange: fx.Node) -> int:
    """The bytes of what an exchange adds up over workers, in the dtype in which it is sent; of what each worker has chosen, if
    that is gathered; of factors, if the sum has low rank."""
    if exchange.target is ops.exchange_low_rank:
        return sum(bytes_of_rounds(program, exchange))
    bucket, pack = program.packs[pack_of(exchange)]
    if exchange.target is ops.gather_largest:
        count: Any = exchange.kwargs["count"]
        return bytes_of_largest(count, pack.num_elements, bucket.dtype)
    pending = exchange.meta.get("val")
    dtype = pending.value.dtype if isinstance(pending, ops.Pending) else bucket.dtype
    return pack.num_elements * dtype.itemsize
