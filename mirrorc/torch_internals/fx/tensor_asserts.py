"""Asserts on tensors that traces record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

NOT_ALL_TRUE = "not all elements are true of what torch._check_tensor_all is given"


def assert_true(condition: torch.Tensor, text: str) -> None:
    """Raises RuntimeError unless a one-element tensor is true. A trace records the assert."""
    torch._assert_async(condition, text)


def _check_all(condition: torch.Tensor, message: Any = None) -> None:
    assert_true(condition.all(), NOT_ALL_TRUE)


def _check_all_with(error_type: type, condition: torch.Tensor, message: Any = None) -> None:
    assert_true(condition.all(), NOT_ALL_TRUE)


CHECKS_OF_TENSORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch._check_tensor_all: _check_all,
    torch._check_tensor_all_with: _check_all_with,
}
"""Substitutes in a trace for torch's checks of tensor values, because a trace cannot format their messages."""
