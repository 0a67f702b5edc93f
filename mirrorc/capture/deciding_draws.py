"""What is traced in place of `torch.rand` where forward decides by what it draws: single numbers are drawn before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mirrorc.torch_internals import one_of_torchs


class DrawnScalar:
    """Stands for a random tensor of one element in a trace; whoever asks more of it than to compare it raises an error.

    Args:
        number: its value.
        is_narrow: whether the tensor would have 32 bits, to which a number is rounded that is compared with it.
    """

    def __init__(self, number: float, is_narrow: bool) -> None:
        self.number, self.is_narrow = number, is_narrow

    def item(self) -> float:
        """The value."""
        return self.number

    def __lt__(self, other: float) -> bool:
        return self.number < self._rounded(other)

    def __le__(self, other: float) -> bool:
        return self.number <= self._rounded(other)

    def __gt__(self, other: float) -> bool:
        return self.number > self._rounded(other)

    def __ge__(self, other: float) -> bool:
        return self.number >= self._rounded(other)

    def _rounded(self, other: float) -> float:
        """A number with 24 significant bits, as a tensor has it: a product with 2**29 + 1 leaves no place for others."""
        if not self.is_narrow:
            return other
        product = other * 536870913.0
        return product - (product - other)


def _rand(*size: Any, **options: Any) -> Any:
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    if options or any(length != 1 for length in shape):
        return torch.empty(*size, **options).uniform_()
    return DrawnScalar(one_of_torchs(), torch.get_default_dtype() == torch.float32)


DECIDING: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.rand: _rand}
"""The functions of torch whose random numbers models decide by, and those that are traced in their place."""
