"""Registers the matrix products that write into given memory, or add there, which ATen has in no traceable form."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")


def _mm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.mm(left, right, out=out)


_LIBRARY.define("mm_into(Tensor(a!) out, Tensor left, Tensor right) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_LIBRARY.impl("mm_into", _mm_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::mm_into", lambda out, left, right: None, lib=_LIBRARY)

mm_into = torch.ops.mirrorc.mm_into.default
"""``mm_into(out, left, right)`` computes ``left @ right`` [m, n] into ``out``, contiguous [m, n] of the same dtype."""


def _linear_into(out: torch.Tensor, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.addmm(bias, left, right, out=out)


_LIBRARY.define(
    "linear_into(Tensor(a!) out, Tensor bias, Tensor left, Tensor right) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("linear_into", _linear_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::linear_into", lambda out, bias, left, right: None, lib=_LIBRARY)

linear_into = torch.ops.mirrorc.linear_into.default
"""``linear_into(out, bias, left, right)`` computes ``bias + left @ right`` [m, n] into ``out``, contiguous, of their dtype."""


def _addmm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    out.addmm_(left, right)


_LIBRARY.define(
    "addmm_into(Tensor(a!) out, Tensor left, Tensor right) -> ()", tags=(torch.Tag.needs_fixed_stride_order,)
)
_LIBRARY.impl("addmm_into", _addmm_into, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::addmm_into", lambda out, left, right: None, lib=_LIBRARY)

addmm_into = torch.ops.mirrorc.addmm_into.default
"""``addmm_into(out, left, right)`` adds ``left @ right`` [m, n] to what ``out`` holds, contiguous [m, n] of the same dtype."""
