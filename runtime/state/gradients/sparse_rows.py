"""Sums of sparse gradients of embedding tables over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.runtime.state.shares.pieces import FactoredBucket
from mirrorc.runtime.state.variables.layout import FlatBucket, slot_views


def add_up_rows(
    flat: FlatBucket, buckets: Sequence[FactoredBucket], replica: int, details: Mapping[str, Any]
) -> torch.Tensor:
    """The sum over replicas of a table's gradient, as rows sorted by index; `FlatBucket.touched` gets the indices.

    Rows with the same index are added in the order of replicas. Looked-up rows stay even if they are zero.
    """
    (slot,), device = flat.bucket.slots, flat.gradients[replica].device
    rows = [rows.reshape(-1, slot.shape[1]) for rows, _ in _parts(buckets)]
    all_rows = torch.cat(rows) if rows else torch.empty(0, slot.shape[1], dtype=flat.bucket.dtype, device=device)
    all_places = _places(flat, buckets, replica)
    unpadded = _counted(all_places, details)
    if unpadded is not None:
        all_rows, all_places = all_rows[unpadded], all_places[unpadded]
    touched, inverse = torch.unique(all_places, return_inverse=True)
    total = torch.zeros(len(touched), slot.shape[1], dtype=flat.bucket.dtype, device=device)
    flat.touched[replica] = touched
    return total.index_add_(0, inverse, all_rows).view(-1)


def note_rows(flat: FlatBucket, buckets: Sequence[FactoredBucket], replica: int, details: Mapping[str, Any]) -> None:
    places = _places(flat, buckets, replica)
    unpadded = _counted(places, details)
    flat.touched[replica] = torch.unique(places if unpadded is None else places[unpadded])


def rows_written(flat: FlatBucket, replica: int) -> torch.Tensor:
    """A copy of the updated rows of the table, 1-D, sorted by index."""
    (table,) = slot_views(flat.parameters[replica], flat.bucket)
    return table.index_select(0, flat.touched[replica]).reshape(-1)


def write_rows(flat: FlatBucket, replica: int, rows: torch.Tensor) -> None:
    (table,) = slot_views(flat.parameters[replica], flat.bucket)
    table.index_copy_(0, flat.touched[replica], rows.view(-1, table.shape[1]))


def _parts(buckets: Sequence[FactoredBucket]) -> list[Sequence[torch.Tensor]]:
    return [part for bucket in buckets for gradient in bucket.factors for part in gradient]


def _places(flat: FlatBucket, buckets: Sequence[FactoredBucket], replica: int) -> torch.Tensor:
    places = [indices.reshape(-1).to(torch.int64) for _, indices in _parts(buckets)]
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=flat.gradients[replica].device)


def _counted(places: torch.Tensor, details: Mapping[str, Any]) -> torch.Tensor | None:
    padding_idx = details.get("padding_idx", -1)
    return (places != padding_idx).nonzero().squeeze(1) if padding_idx >= 0 else None


def bytes_of_rows(bucket: Bucket, num_bytes: int) -> tuple[int, int]:
    """Upper bounds for the bytes of a sum of rows, and for temporary bytes. ``num_bytes`` counts all replicas."""
    return min(num_bytes, bucket.num_bytes + bucket.slots[0].shape[0] * torch.int64.itemsize), 2 * num_bytes
