"""What is traced in place of `torch.rand` where forward decides by what it draws: single numbers are drawn before the step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mirrorc.torch_internals import one_of_torchs, traced_file


class DrawnScalarDecides:
    """Stands for what a comparison of a `DrawnScalar` gives; whoever asks more of it than which way to go raises an error.

    No bool: as tensors, two of them have a sum of one, and ``~`` is their opposite.
    """

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    @property  # type: ignore[misc]  # it cannot be written
    def __class__(self) -> type:
        """What isinstance() in a trace asks for: a tensor, but in this file."""
        return DrawnScalarDecides if traced_file() in ("", __file__) else torch.Tensor

    def __bool__(self) -> bool:
        return self.answer

    def item(self) -> bool:
        """The answer."""
        return self.answer

    def __eq__(self, other: object) -> bool:
        raise TypeError("what a DrawnScalar decides equals no other value")

    __hash__ = None  # type: ignore[assignment]


class DrawnScalar:
    """Stands for a random tensor of one element in a trace; whoever asks more of it than to compare it raises an error.

    Args:
        number: its value, of 0 to 1.
        shape: that of the tensor.
        dtype: that of the tensor, float32 or float64.
    """

    def __init__(self, number: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype

    @property  # type: ignore[misc]  # it cannot be written
    def __class__(self) -> type:
        """What isinstance() in a trace asks for: a tensor, but in this file."""
        return DrawnScalar if traced_file() in ("", __file__) else torch.Tensor

    def item(self) -> float:
        """The value."""
        return self.number

    def __bool__(self) -> bool:
        return self.number != 0.0

    def __lt__(self, other: Any) -> Any:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compared(operator.ge, other)

    def __eq__(self, other: object) -> Any:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compared(operator.ne, other)

    __hash__ = None  # type: ignore[assignment]

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        """What PyTorch gives: a tensor if the other is one, and otherwise what decides."""
        if isinstance(other, torch.Tensor):
            return compare(torch.zeros(self.shape, dtype=self.dtype) + self.number, other)
        if not isinstance(other, (int, float)):
            raise TypeError("a DrawnScalar is compared with numbers and tensors only")
        is_nan = other != other  # no traced number is compared with nan; all numbers answer alike
        return DrawnScalarDecides(compare(0.0 if is_nan else self.number, self._rounded(other)))

    def _rounded(self, other: float) -> float:
        """A number as this tensor has it, where that can matter.

        With 24 significant bits for float32: a product with 2**29 + 1 leaves no place for others.
        """
        if self.dtype == torch.float64 or not 0.0 < other < 1.0:
            return other
        if other <= 2.0**-150:
            return 0.0
        product = other * 536870913.0
        return product - (product - other)


def _rand(*size: Any, **options: Any) -> Any:
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    dtype = torch.get_default_dtype()
    if options or any(length != 1 for length in shape) or dtype not in (torch.float32, torch.float64):
        return torch.empty(*size, **options).uniform_()
    return DrawnScalar(one_of_torchs(), tuple(shape), dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, DrawnScalar, DrawnScalarDecides))


DECIDING: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.rand: _rand, torch.is_tensor: _is_tensor}
"""The functions of torch whose random numbers models decide by, that which would not know them, and what is traced instead."""
