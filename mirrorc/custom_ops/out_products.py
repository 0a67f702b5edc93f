"""Operators that write matrix products, or add table rows, into existing memory."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")


def _mm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.mm(left, right, out=out)


_LIBRARY.define("mm_into(Tensor(a!) out, Tensor left, Tensor right) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_LIBRARY.impl("mm_into", _mm_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::mm_into", lambda out, left, right: None, lib=_LIBRARY)

mm_into = torch.ops.mirrorc.mm_into.default
"""``mm_into(out, left, right)`` writes ``left @ right`` into ``out``, contiguous, same dtype."""


def _linear_into(out: torch.Tensor, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.addmm(bias, left, right, out=out)


_LIBRARY.define(
    "linear_into(Tensor(a!) out, Tensor bias, Tensor left, Tensor right) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("linear_into", _linear_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::linear_into", lambda out, bias, left, right: None, lib=_LIBRARY)

linear_into = torch.ops.mirrorc.linear_into.default
"""``linear_into(out, bias, left, right)`` writes ``bias + left @ right`` into ``out``, contiguous, same dtype."""


def _addmm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    out.addmm_(left, right)


_LIBRARY.define(
    "addmm_into(Tensor(a!) out, Tensor left, Tensor right) -> ()", tags=(torch.Tag.needs_fixed_stride_order,)
)
_LIBRARY.impl("addmm_into", _addmm_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::addmm_into", lambda out, left, right: None, lib=_LIBRARY)

addmm_into = torch.ops.mirrorc.addmm_into.default
"""``addmm_into(out, left, right)`` adds ``left @ right`` to ``out``, contiguous, same dtype."""


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

It has the bits of ``out += embedding_dense_backward(rows, indices, m, padding_idx, False)``: rows with the same index
are summed first.
"""
