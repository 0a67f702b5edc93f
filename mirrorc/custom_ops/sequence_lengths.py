"""An operator that checks lengths like `pack_padded_sequence`."""

from __future__ import annotations

import torch

from mirrorc.custom_ops.registration import register


def _checked(lengths: torch.Tensor, time: int, is_sorted: bool) -> torch.Tensor:
    result = lengths.to(torch.int64, copy=True)
    values = result.tolist()
    if min(values) <= 0:
        raise RuntimeError(
            f"Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0: {min(values)}"
        )
    if max(values) > time:
        raise RuntimeError(f"a sequence is said to have {max(values)} items, but the padded tensor has {time}")
    if is_sorted and values != sorted(values, reverse=True):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence"
        )
    return result


checked_lengths = register(
    "checked_lengths(Tensor lengths, int time, bool is_sorted) -> Tensor",
    _checked,
    lambda lengths, time, is_sorted: lengths.new_empty(lengths.shape, dtype=torch.int64),
)
"""``checked_lengths(lengths, time, is_sorted)``: a copy of the lengths [batch] as int64.

Raises RuntimeError if a length is not positive or exceeds the time, or if lengths are unsorted despite ``is_sorted``.
"""
