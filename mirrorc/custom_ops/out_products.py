"""Operators that write matrix products, or add table rows, into existing memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirrorc.custom_ops.registration import FIXED_STRIDES, register


def _registered(arguments: str, run: Callable[..., None]) -> Any:
    return register(f"{arguments} -> ()", run, lambda *_, **__: None, tags=FIXED_STRIDES)


def _mm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.mm(left, right, out=out)


mm_into = _registered("mm_into(Tensor(a!) out, Tensor left, Tensor right)", _mm_into)
"""``mm_into(out, left, right)`` writes ``left @ right`` into ``out``, contiguous, same dtype."""


def _linear_into(out: torch.Tensor, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.addmm(bias, left, right, out=out)


linear_into = _registered("linear_into(Tensor(a!) out, Tensor bias, Tensor left, Tensor right)", _linear_into)
"""``linear_into(out, bias, left, right)`` writes ``bias + left @ right`` into ``out``, contiguous, same dtype."""


def _addmm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    out.addmm_(left, right)


addmm_into = _registered("addmm_into(Tensor(a!) out, Tensor left, Tensor right)", _addmm_into)
"""``addmm_into(out, left, right)`` adds ``left @ right`` to ``out``, contiguous, same dtype."""


def _add_rows_into(out: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> None:
    flat = rows.reshape(-1, rows.shape[-1])
    if padding_idx >= 0:
        flat = flat.masked_fill((indices == padding_idx).reshape(-1, 1), 0.0)
    places, place_of_row = indices.reshape(-1).unique(return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward.default(flat, place_of_row, len(places), -1, False)
    out.index_add_(0, places, sums)


add_rows_into = _registered(
    "add_rows_into(Tensor(a!) out, Tensor rows, Tensor indices, int padding_idx)", _add_rows_into
)
"""``add_rows_into(out, rows, indices, padding_idx)`` adds rows [..., n] at indices [...] to ``out`` [m, n].

It has the bits of ``out += embedding_dense_backward(rows, indices, m, padding_idx, False)``: rows are summed first.
"""
