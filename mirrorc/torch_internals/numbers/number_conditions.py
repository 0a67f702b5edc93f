"""Asks on Python numbers what a trace has asked on symbols."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]

from mirrorc.torch_internals.numbers.host_numbers import Number


class NoCondition(Exception):
    """A guard is not of a kind that can be asked on numbers."""


def condition_of(expr: Any, place_of: Mapping[Any, int]) -> Callable[[Sequence[Number]], bool]:
    """What a guard asks, as a question on numbers. It computes with fractions: as real numbers, without rounding."""
    compare = {
        sympy.Eq: operator.eq,
        sympy.Ne: operator.ne,
        sympy.StrictLessThan: operator.lt,
        sympy.LessThan: operator.le,
        sympy.StrictGreaterThan: operator.gt,
        sympy.GreaterThan: operator.ge,
    }
    if expr is sympy.true or expr is True:
        return lambda _: True
    if isinstance(expr, sympy.Not):
        inner = condition_of(expr.args[0], place_of)
        return lambda numbers: not inner(numbers)
    if isinstance(expr, sympy.And | sympy.Or):
        parts = [condition_of(arg, place_of) for arg in expr.args]
        among = all if isinstance(expr, sympy.And) else any
        return lambda numbers: among(part(numbers) for part in parts)
    for kind, ask in compare.items():
        if isinstance(expr, kind):
            left, right = (_term(arg, place_of) for arg in expr.args)
            return _comparison(ask, left, right)
    raise NoCondition(str(expr))


def _comparison(ask: Callable[[Any, Any], Any], left: Any, right: Any) -> Callable[[Sequence[Number]], bool]:
    return lambda numbers: bool(ask(left(numbers), right(numbers)))


def _term(expr: Any, place_of: Mapping[Any, int]) -> Callable[[Sequence[Number]], Any]:
    if expr in place_of:
        place = place_of[expr]
        return lambda numbers: numbers[place]  # Python compares numbers of both kinds without rounding
    if isinstance(expr, sympy.Integer):
        integer = int(expr)
        return lambda _: integer
    if isinstance(expr, sympy.Float):
        number = float(expr)
        return lambda _: number
    if isinstance(expr, sympy.Add | sympy.Mul):
        parts = [_term(arg, place_of) for arg in expr.args]
        join = sum if isinstance(expr, sympy.Add) else math.prod
        return lambda numbers: join([Fraction(part(numbers)) for part in parts])
    if type(expr).__name__ == "ToFloat":
        return _term(expr.args[0], place_of)
    raise NoCondition(str(expr))
