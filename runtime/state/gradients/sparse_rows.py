"""Adds up the rows that replicas give of a table's gradient, for optimizers that take sparse tensors."""

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
    """The sum over replicas of a table's gradient: those of its rows that any of them has looked up.

    Rows of one index are added up in the order of replicas, and stand in the order of their indices, which are noted in
    `FlatBucket.touched` for the optimizer. A row whose gradients cancel each other is there: it was looked up.

    Args:
        flat: the bucket, which has one table.
        buckets: of all replicas, in order.
        replica: whose sum it is.
        details: of the gradient, see `mirrorc.ir.gradient_forms.TableForm`.

    Returns:
        The rows, 1-D.
    """
    (slot,), device = flat.bucket.slots, flat.gradients[replica].device
    rows = [rows.reshape(-1, slot.shape[1]) for rows, _ in _parts(buckets)]
    all_rows = torch.cat(rows) if rows else torch.empty(0, slot.shape[1], dtype=flat.bucket.dtype, device=device)
    all_places = _places(flat, buckets, replica)
    kept = _counted(all_places, details)
    if kept is not None:
        all_rows, all_places = all_rows[kept], all_places[kept]
    touched, inverse = torch.unique(all_places, return_inverse=True)
    total = torch.zeros(len(touched), slot.shape[1], dtype=flat.bucket.dtype, device=device)
    flat.touched[replica] = touched
    return total.index_add_(0, inverse, all_rows).view(-1)


def note_rows(flat: FlatBucket, buckets: Sequence[FactoredBucket], replica: int, details: Mapping[str, Any]) -> None:
    """Notes in `FlatBucket.touched` which rows the sum has that `add_up_rows` makes; takes the same arguments."""
    places = _places(flat, buckets, replica)
    kept = _counted(places, details)
    flat.touched[replica] = torch.unique(places if kept is None else places[kept])


def rows_written(flat: FlatBucket, replica: int) -> torch.Tensor:
    """A copy of the rows of a replica's table that the step's gradient has, 1-D, in the order of their indices."""
    (table,) = slot_views(flat.parameters[replica], flat.bucket)
    return table.index_select(0, flat.touched[replica]).reshape(-1)


def write_rows(flat: FlatBucket, replica: int, rows: torch.Tensor) -> None:
    """Writes what `rows_written` has given on another replica, whose gradient has the same rows."""
    (table,) = slot_views(flat.parameters[replica], flat.bucket)
    table.index_copy_(0, flat.touched[replica], rows.view(-1, table.shape[1]))


def _parts(buckets: Sequence[FactoredBucket]) -> list[Sequence[torch.Tensor]]:
    """Rows and indices, of one replica after the other."""
    return [part for bucket in buckets for gradient in bucket.factors for part in gradient]


def _places(flat: FlatBucket, buckets: Sequence[FactoredBucket], replica: int) -> torch.Tensor:
    """The indices of all rows."""
    places = [indices.reshape(-1).to(torch.int64) for _, indices in _parts(buckets)]
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=flat.gradients[replica].device)


def _counted(places: torch.Tensor, details: Mapping[str, Any]) -> torch.Tensor | None:
    """The places of the rows that are added, without those of padding; None if there is no padding."""
    padding_idx = details.get("padding_idx", -1)
    return (places != padding_idx).nonzero().squeeze(1) if padding_idx >= 0 else None


def bytes_of_rows(bucket: Bucket, num_bytes: int) -> tuple[int, int]:
    """The most bytes that a sum of rows has, and the temporary bytes that `add_up_rows` needs.

    Args:
        bucket: the bucket.
        num_bytes: of the rows and indices of all replicas.
    """
    return min(num_bytes, bucket.num_bytes + bucket.slots[0].shape[0] * torch.int64.itemsize), 2 * num_bytes
