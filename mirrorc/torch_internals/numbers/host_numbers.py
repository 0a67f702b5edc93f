"""Python numbers that a graph takes, and how they follow from what Python reads: computed again on the host before each step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

Number = int | float

_LARGEST = 2.0**53
"""Up to here, integers are floats without rounding. A larger number, like one that is not finite, stays a constant."""
_LARGEST_FLOAT = 3e38  # a comparison with a tensor of 32 bits raises an error above

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}


class NumbersGivenUp(Exception):
    """Some numbers cannot be inputs of a graph.

    Attributes:
        names: the expressions that read them.
        why: in a few words.
        words: what users call them; filled in where that is known.
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


@dataclass(frozen=True)
class Slot:
    """Stands for a number in the arguments of a computation."""

    index: int


@dataclass
class NumberInputs:
    """The numbers that a graph takes, and how they follow from what Python reads.

    Attributes:
        sources: the expressions that read numbers.
        kinds: the type of each number: of the sources first, then of what is computed.
        computed: what Python computes, in order: a function, and its arguments with a `Slot` for each number.
        conditions: what must hold for the graph to be that of the numbers.
        given: the indices of the numbers that the graph takes.
        values: those numbers, as they were read last.
    """

    sources: list[str] = field(default_factory=list)
    kinds: list[type] = field(default_factory=list)
    computed: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    conditions: list[Callable[[Sequence[Number]], bool]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    values: tuple[Number, ...] = ()
    _found: list[Number] = field(default_factory=list)
    _codes: list[CodeType] = field(default_factory=list)

    def read(self, scope: dict[str, Any]) -> bool:
        """Reads the numbers again; whether the graph is that of what they are now."""
        if not self._codes:
            self._codes = [compile(name, "<number>", "eval") for name in self.sources]
        try:
            found = self.computed_from([eval(code, scope) for code in self._codes])
        except Exception:  # noqa: BLE001 - what Python cannot compute is no input; the trace says why
            return False
        if not all(map(is_ordinary, found)) or not all(map(_is_of, found, self.kinds)):
            return False
        if not all(condition(found) for condition in self.conditions):
            return False
        self._found = found
        self.values = tuple(found[index] for index in self.given)
        return True

    def computed_from(self, values: Sequence[Any]) -> list[Any]:
        """The numbers of the sources, and what Python computes of them."""
        found = list(values)
        for function, args, kwargs in self.computed:
            found.append(function(*filled(args, found), **{key: fill(arg, found) for key, arg in kwargs.items()}))
        return found

    def all_values(self) -> list[Number]:
        """All numbers as they were read last."""
        return list(self._found)

    def text(self, index: int, words: Sequence[str]) -> str:
        """How Python computes a number, with these words for the sources."""
        if index < len(self.sources):
            return words[index]
        function, args, kwargs = self.computed[index - len(self.sources)]
        told = [
            self.text(arg.index, words) if isinstance(arg, Slot) else repr(arg) for arg in (*args, *kwargs.values())
        ]
        name = getattr(function, "__name__", "a function")
        if name in _SIGNS and len(told) == 2:
            return f"({told[0]} {_SIGNS[name]} {told[1]})"
        return f"{name}({', '.join(told)})"

    def names_of(self, index: int) -> list[str]:
        """The expressions that read what a number is computed of."""
        if index < len(self.sources):
            return [self.sources[index]]
        _, args, kwargs = self.computed[index - len(self.sources)]
        slots = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Slot)]
        return list(dict.fromkeys(name for slot in slots for name in self.names_of(slot.index)))


def _is_of(value: Any, kind: type) -> bool:
    return type(value) is kind


def filled(args: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Arguments with the numbers that were found in place of their slots."""
    return [fill(arg, found) for arg in args]


def fill(arg: Any, found: Sequence[Any]) -> Any:
    """The number that was found for a slot; anything else stays as it is."""
    return found[arg.index] if isinstance(arg, Slot) else arg
