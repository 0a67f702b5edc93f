"""Reasons to compute a gradient whole, in the words of remarks."""

from __future__ import annotations

import torch

from mirrorc.ir.gradient_forms import GradientForm


def why_whole(gradient: torch.Tensor, strides: tuple[int, ...] | None, least_elements: int) -> str:
    """Empty if a gradient can stay factors. ``strides`` are None if the optimizer is not element-wise."""
    if strides is None:
        return "of optimizers that need them whole"
    if gradient.numel() < least_elements:
        return f"of fewer than {least_elements} elements"
    return "" if gradient.stride() == strides else "with other strides than their slots"


def why_whole_in_microbatches(form: GradientForm) -> str:
    """Empty if a gradient can stay factors in microbatches."""
    return "" if form.takes_parts else f"{form.description} that is made of the factors of one microbatch alone"
