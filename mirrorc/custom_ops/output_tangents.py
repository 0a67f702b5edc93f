"""A placeholder operator for the gradient of an output, which comes from the caller's loss."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")
_LIBRARY.define("output_tangent(Tensor output, str name) -> Tensor")
_LIBRARY.impl("output_tangent", lambda output, name: torch.zeros_like(output), "CompositeExplicitAutograd")
torch.library.register_fake(
    "mirrorc::output_tangent",
    lambda output, name: torch.empty_like(output, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)

output_tangent = torch.ops.mirrorc.output_tangent.default
"""``output_tangent(output, name)``: the gradient of the caller's loss with respect to this output, contiguous.

When the graph is cut into programs of forward and backward, the value becomes an argument of backward.
"""
