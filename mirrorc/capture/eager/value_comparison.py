"""Compares the Python state after two runs."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from mirrorc.user.restore import bytes_of, can_keep_value, is_collection

PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


def are_equal(first: Any, second: Any, depth: int = 0) -> bool:
    """Compares values by content; other objects, and tensors that require gradients, by identity."""
    if first is second:
        return True
    if type(first) is not type(second) or depth > 20:
        return False
    if isinstance(first, torch.Tensor):
        is_plain = all(can_keep_value(tensor) and not tensor.requires_grad for tensor in (first, second))
        types = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (first, second)]
        return is_plain and types[0] == types[1] and have_same_bits(first, second)
    if isinstance(first, np.ndarray):
        return (first.shape, first.dtype) == (second.shape, second.dtype) and first.tobytes() == second.tobytes()
    if isinstance(first, float):
        return first == second or (first != first and second != second)  # nan equals itself
    if isinstance(first, PLAIN):
        return bool(first == second)
    if isinstance(first, set | frozenset | bytearray | array):
        return first == second
    if is_collection(first) or isinstance(first, tuple):
        if isinstance(first, dict) and list(first) != list(second):
            return False
        items = [(*(each.values() if isinstance(each, dict) else each),) for each in (first, second)]
        return len(first) == len(second) and all(
            are_equal(a, b, depth + 1) for a, b in zip(items[0], items[1], strict=True)
        )
    return False


def requires_gradient(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if not (is_collection(value) or isinstance(value, tuple)) or depth > 20:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(requires_gradient(item, depth + 1) for item in items)


def have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(bytes_of(first), bytes_of(second))
