"""Numbers of Python and numpy that are graph inputs, computed on the CPU before each step."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Number = int | float | np.integer[Any] | np.floating[Any]

_LARGEST = 2.0**53
"""The largest integer that floats represent exactly. Larger or non-finite numbers stay constants."""
_LARGEST_FLOAT = 3e38  # the limit of comparisons with float32 tensors

NARROW = (np.float16, np.float32)
"""Types that round Python floats in comparisons."""
_FLOATS = (float, np.float64, *NARROW)
_INTEGERS = (int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_RELATIONS = {  # of sympy, by the names of their classes: importing sympy takes long
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
}


class NumbersGivenUp(Exception):
    """Raised if numbers cannot be inputs of a graph.

    Attributes:
        words: the user's names of the numbers, if known.
        stack: the frames of a number's random draw, outermost first, if known.
    """

    def __init__(self, names: Collection[str], why: str) -> None:
        super().__init__(why)
        self.names, self.why = frozenset(names), why
        self.words: list[str] = []
        self.stack: Sequence[traceback.FrameSummary] = ()


def is_ordinary(value: Any) -> bool:
    """True for a number that can be an input: not a bool, nan, infinite, or very large."""
    if type(value) in _FLOATS:
        return -_LARGEST_FLOAT < float(value) < _LARGEST_FLOAT
    return type(value) in _INTEGERS and -_LARGEST < int(value) < _LARGEST


def plain_number(value: Number) -> int | float:
    """The Python number of the same value. Operators on tensors treat numpy's numbers like Python's."""
    return value.item() if isinstance(value, np.generic) else value


def is_float(kind: type) -> bool:
    return kind in _FLOATS


def attribute_source(path: Sequence[str], name: str) -> str:
    return "".join(("L['self']", *(f"._modules[{part!r}]" for part in path), f".{name}"))


class Slot(NamedTuple):
    """An argument that is an earlier number, with its index among all numbers."""

    place: int


class HostNumber(NamedTuple):
    """A number that Python reads, or computes from earlier numbers.

    Attributes:
        sources: the expressions from which the number is computed.
        function: computes the number; None for a read.
        args: the function's arguments, with a `Slot` for each number; for a read, the code of the expression.
    """

    kind: type
    sources: tuple[str, ...]
    function: Callable[..., Any] | None
    args: tuple[Any, ...]


def computed(function: Callable[..., Any], args: Sequence[Any], numbers: Sequence[Number]) -> Any:
    return function(*(numbers[arg.place] if isinstance(arg, Slot) else arg for arg in args))


class HostNumbers:
    """The numbers of a trace, in the order in which Python reads and computes them.

    Attributes:
        taken: the indices of numbers that are inputs of the graph.
    """

    def __init__(self) -> None:
        self.numbers: list[HostNumber] = []
        self.values: list[Number] = []
        self.taken: list[int] = []
        self._symbols: list[Any] = []
        self._conditions: list[Any] = []

    def add(self, number: HostNumber, value: Number, symbol: Any) -> int:
        self.numbers.append(number)
        self.values.append(value)
        self._symbols.append(symbol)
        return len(self.numbers) - 1

    def has_symbol_of(self, guard: Any) -> bool:
        return not guard.free_symbols.isdisjoint(self._symbols)

    def add_condition(self, guard: Any) -> None:
        """Raises `NumbersGivenUp` if a guard fails, or depends on more than numbers."""
        try:
            holds = _holds(guard, dict(zip(self._symbols, map(plain_number, self.values), strict=True)))
        except NotImplementedError as error:
            why = f"it is compared in a way that cannot be followed ({error})"
            raise NumbersGivenUp(self.sources, why) from error
        if not holds:
            raise NumbersGivenUp(self.sources, f"{guard} is not what Python finds")
        self._conditions.append(guard)

    @property
    def sources(self) -> list[str]:
        return [number.sources[0] for number in self.numbers if number.function is None]

    def read(self, scope: dict[str, Any]) -> bool:
        """Reads the numbers again. False if a number cannot be read, has another type, or breaks a guard."""
        values: list[Any] = []
        for kind, _, function, args in self.numbers:
            try:
                value = computed(function, args, values) if function is not None else eval(args[0], scope)
            except Exception:  # noqa: BLE001 - no input; the next trace says why
                return False
            if type(value) is not kind or not is_ordinary(value):
                return False
            values.append(value)
        value_of = dict(zip(self._symbols, map(plain_number, values), strict=True)) if self._conditions else {}
        if not all(_holds(condition, value_of) for condition in self._conditions):
            return False
        self.values = values
        return True

    def text(self, index: int, words: Callable[[str], str] = str, *, is_operand: bool = False) -> str:
        _, sources, function, args = self.numbers[index]
        if function is None:
            return words(sources[0])
        name = getattr(function, "__name__", "a function").strip("_")
        sign = _SIGNS.get(name, "") if len(args) == 2 else ""
        texts = [self.text(a.place, words, is_operand=bool(sign)) if isinstance(a, Slot) else repr(a) for a in args]
        if not sign:
            return f"{name}({', '.join(texts)})"
        text = f"{texts[0]} {sign} {texts[1]}"
        return f"({text})" if is_operand else text


def _holds(expr: Any, value_of: Mapping[Any, int | float]) -> bool:
    """Evaluates all parts of a guard, without short circuits, to find unsupported parts."""
    import sympy  # type: ignore[import-untyped]

    if expr in (True, False):
        return bool(expr)
    if isinstance(expr, sympy.Not | sympy.And | sympy.Or):
        parts = [_holds(arg, value_of) for arg in expr.args]
        return not parts[0] if isinstance(expr, sympy.Not) else (all if isinstance(expr, sympy.And) else any)(parts)
    if isinstance(expr, sympy.core.relational.Relational) and type(expr).__name__ in _RELATIONS:
        left, right = (_term(arg, value_of) for arg in expr.args)
        return bool(_RELATIONS[type(expr).__name__](left, right))
    raise NotImplementedError(str(expr))


def _term(expr: Any, value_of: Mapping[Any, int | float]) -> int | float:
    import sympy

    if type(expr).__name__ == "ToFloat":  # Python compares int and float without rounding
        expr = expr.args[0]
    if expr in value_of:
        return value_of[expr]
    if isinstance(expr, sympy.Integer | sympy.Float):
        return int(expr) if isinstance(expr, sympy.Integer) else float(expr)
    raise NotImplementedError(str(expr))
