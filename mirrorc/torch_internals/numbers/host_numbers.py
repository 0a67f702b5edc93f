"""Python numbers that a graph takes: read and computed on the host before each step."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]

Number = int | float

_LARGEST = 2.0**53
"""Up to here, integers are floats without rounding. A larger number, or one that is not finite, stays a constant."""
_LARGEST_FLOAT = 3e38  # a comparison with a tensor of 32 bits raises an error above

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_RELATIONS = {
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.StrictLessThan: operator.lt,
    sympy.LessThan: operator.le,
    sympy.StrictGreaterThan: operator.gt,
    sympy.GreaterThan: operator.ge,
}


class NumbersGivenUp(Exception):
    """Some numbers cannot be inputs of a graph.

    Attributes:
        names: the expressions that read them.
        why: in a few words.
        words: the users' names for them; filled in where they are known.
        stack: likewise, the frames in which one of them is drawn at random, outermost first.
    """

    def __init__(self, names: Collection[str], why: str) -> None:
        super().__init__(why)
        self.names, self.why = frozenset(names), why
        self.words: list[str] = []
        self.stack: Sequence[traceback.FrameSummary] = ()


def is_ordinary(value: Any) -> bool:
    """Whether a value is a number that can be an input: neither a truth value, nor nan, infinite or very large."""
    if type(value) is float:
        return -_LARGEST_FLOAT < value < _LARGEST_FLOAT
    return type(value) is int and -_LARGEST < value < _LARGEST


def attribute_source(path: Sequence[str], name: str) -> str:
    """The expression by which Dynamo reads an attribute of the module at a path in what is traced."""
    return "".join(("L['self']", *(f"._modules[{part!r}]" for part in path), f".{name}"))


class Slot(NamedTuple):
    """An argument of a computation: the number at a place."""

    place: int


class HostNumber(NamedTuple):
    """A number that Python reads, or computes of numbers before it.

    Attributes:
        kind: its type.
        sources: the expressions that are read for it.
        function: computes it; None for a number that is read.
        args: of the function, with a `Slot` for each number; the code of the expression for a number that is read.
    """

    kind: type
    sources: tuple[str, ...]
    function: Callable[..., Any] | None
    args: tuple[Any, ...]


def computed(function: Callable[..., Any], args: Sequence[Any], numbers: Sequence[Number]) -> Any:
    """The result of a function on arguments, with numbers in the places of their slots."""
    return function(*(numbers[arg.place] if isinstance(arg, Slot) else arg for arg in args))


class HostNumbers:
    """The numbers of a trace, in Python's order, and which of them the graph takes.

    Attributes:
        numbers: all that are read and computed.
        values: these numbers as they were read last.
        taken: the indices of the numbers that the graph takes.
    """

    def __init__(self) -> None:
        self.numbers: list[HostNumber] = []
        self.values: list[Number] = []
        self.taken: list[int] = []
        self._symbols: list[Any] = []
        self._conditions: list[Any] = []

    def add(self, number: HostNumber, value: Number, symbol: Any) -> int:
        """Adds a number, with its value in the trace and Dynamo's symbol for it; returns its index."""
        self.numbers.append(number)
        self.values.append(value)
        self._symbols.append(symbol)
        return len(self.numbers) - 1

    def add_condition(self, guard: Any) -> None:
        """Adds a guard on symbols, which must hold for the numbers.

        Raises:
            NumbersGivenUp: it cannot be asked on numbers, or does not hold.
        """
        try:
            holds = _holds(guard, dict(zip(self._symbols, self.values, strict=True)))
        except NotImplementedError as error:
            why = f"it is compared in a way that cannot be followed ({error})"
            raise NumbersGivenUp(self.sources, why) from error
        if not holds:
            raise NumbersGivenUp(self.sources, f"{guard} is not what Python finds")
        self._conditions.append(guard)

    @property
    def sources(self) -> list[str]:
        """The expressions that are read."""
        return [number.sources[0] for number in self.numbers if number.function is None]

    def read(self, scope: dict[str, Any]) -> bool:
        """Reads the numbers again; returns whether the graph is that of the new ones."""
        values: list[Any] = []
        for kind, _, function, args in self.numbers:
            try:
                value = computed(function, args, values) if function is not None else eval(args[0], scope)
            except Exception:  # noqa: BLE001 - no input; the next trace says why
                return False
            if type(value) is not kind or not is_ordinary(value):
                return False
            values.append(value)
        value_of = dict(zip(self._symbols, values, strict=True)) if self._conditions else {}
        if not all(_holds(condition, value_of) for condition in self._conditions):
            return False
        self.values = values
        return True

    def text(self, index: int, words: Callable[[str], str] = str, *, is_operand: bool = False) -> str:
        """How Python computes a number, with the names that ``words`` has for its sources."""
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


def _holds(expr: Any, value_of: Mapping[Any, Number]) -> bool:
    """Whether a guard holds for numbers; looks at all of it.

    Raises:
        NotImplementedError: it compares more than numbers, all of which have symbols, and constants.
    """
    if expr in (True, False):
        return bool(expr)
    if isinstance(expr, sympy.Not | sympy.And | sympy.Or):
        parts = [_holds(arg, value_of) for arg in expr.args]
        return not parts[0] if isinstance(expr, sympy.Not) else (all if isinstance(expr, sympy.And) else any)(parts)
    if type(expr) in _RELATIONS:
        left, right = (_term(arg, value_of) for arg in expr.args)
        return bool(_RELATIONS[type(expr)](left, right))
    raise NotImplementedError(str(expr))


def _term(expr: Any, value_of: Mapping[Any, Number]) -> Number:
    if type(expr).__name__ == "ToFloat":  # Python compares numbers of both kinds without rounding
        expr = expr.args[0]
    if expr in value_of:
        return value_of[expr]
    if isinstance(expr, sympy.Integer | sympy.Float):
        return int(expr) if isinstance(expr, sympy.Integer) else float(expr)
    raise NotImplementedError(str(expr))
