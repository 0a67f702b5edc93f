"""Registers the sum of a table's looked-up rows into given memory, which ATen has in no traceable form."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")


def _add_rows_into(out: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> None:
    flat = rows.reshape(-1, rows.shape[-1])
    if padding_idx >= 0:
        flat = flat.masked_fill((indices == padding_idx).reshape(-1, 1), 0.0)
    places, place_of_row = indices.reshape(-1).unique(return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward.default(flat, place_of_row, len(places), -1, False)
    out.index_add_(0, places, sums)


_LIBRARY.define(
    "add_rows_into(Tensor(a!) out, Tensor rows, Tensor indices, int padding_idx) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("add_rows_into", _add_rows_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::add_rows_into", lambda out, rows, indices, padding_idx: None, lib=_LIBRARY)

add_rows_into = torch.ops.mirrorc.add_rows_into.default
"""``add_rows_into(out, rows, indices, padding_idx)`` adds rows [..., n] at indices [...] to ``out`` [m, n].

It is ``out += embedding_dense_backward(rows, indices, m, padding_idx, False)``, bit for bit, as rows of one index are added up
first. Other rows of ``out`` are not touched.
"""
