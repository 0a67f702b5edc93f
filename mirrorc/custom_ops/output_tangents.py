"""A placeholder operator for the gradient of an output, which comes from the caller's loss."""

from __future__ import annotations

import torch

from mirrorc.custom_ops.registration import register

output_tangent = register(
    "output_tangent(Tensor output, str name) -> Tensor",
    lambda output, name: torch.zeros_like(output),
    lambda output, name: torch.empty_like(output, memory_format=torch.contiguous_format),
)
"""``output_tangent(output, name)``: the gradient of the caller's loss with respect to this output, contiguous.

When the graph is cut into programs of forward and backward, the value becomes an argument of backward.
"""
