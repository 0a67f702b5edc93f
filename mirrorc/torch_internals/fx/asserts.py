"""Asserts about tensors, which a traced function keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

NOT_ALL_TRUE = "not all elements are true of what torch._check_tensor_all is given"


def assert_true(condition: torch.Tensor, text: str) -> None:
    """Raises RuntimeError with this text unless a tensor of one element is true; in a trace, leaves that to what is traced."""
    torch._assert_async(condition, text)


def _check_all(condition: torch.Tensor, message: Any = None) -> None:
    assert_true(condition.all(), NOT_ALL_TRUE)


def _check_all_with(error_type: type, condition: torch.Tensor, message: Any = None) -> None:
    assert_true(condition.all(), NOT_ALL_TRUE)


CHECKS_OF_TENSORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch._check_tensor_all: _check_all,
    torch._check_tensor_all_with: _check_all_with,
}
"""Functions of torch that read a tensor to check it, with what is traced in their place; a trace cannot make their messages."""
