"""A substitute for `torch.rand` in forwards that branch on random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mirrorc.torch_internals import torch_random, traced_file


class _Scalar:
    """A number that counts as a tensor for isinstance() in a trace, except in this file. It lacks tensors' methods."""

    @property  # type: ignore[misc]  # it cannot be written
    def __class__(self) -> type:
        return type(self) if traced_file() in ("", __file__) else torch.Tensor


class DrawnScalarDecides(_Scalar):
    """The result of comparing a `DrawnScalar`, on which forward branches.

    It is not a bool, because ``+`` and ``~`` differ for bools and boolean tensors.
    """

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def item(self) -> bool:
        return self.answer

    def __eq__(self, other: object) -> bool:
        raise TypeError("what a DrawnScalar decides equals no other value")


def _comparison(compare: Callable[[Any, Any], Any]) -> Any:
    def method(self: DrawnScalar, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return compare(torch.zeros(self.shape, dtype=self.dtype) + self.number, other)
        if not isinstance(other, (int, float)):
            raise TypeError("a DrawnScalar is compared with numbers and tensors only")
        is_nan = other != other  # a trace cannot compare with nan; any number gives the same result
        return DrawnScalarDecides(compare(0.0 if is_nan else self.number, self._rounded(other)))

    return method


class DrawnScalar(_Scalar):
    """A random tensor of one element in a trace. It supports only comparisons, item() and bool()."""

    def __init__(self, number: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype

    def item(self) -> float:
        return self.number

    def __bool__(self) -> bool:
        return self.number != 0.0

    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def _rounded(self, other: float) -> float:
        """Rounds to the 24 significant bits of float32, with traceable arithmetic."""
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
    return DrawnScalar(torch_random(), tuple(shape), dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, DrawnScalar, DrawnScalarDecides))


DECIDING: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.rand: _rand, torch.is_tensor: _is_tensor}
"""Substitutes in a trace for functions of torch."""
