"""Asserts about tensors, which a traced function keeps."""

from __future__ import annotations

import torch


def assert_true(condition: torch.Tensor, text: str) -> None:
    """Raises RuntimeError with this text unless a tensor of one element is true; in a trace, leaves that to what is traced."""
    torch._assert_async(condition, text)
