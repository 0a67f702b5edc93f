"""Detects changes to methods that a trace has entered."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

_ABSENT = object()
_FROM_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of other classes cannot be set


class TracedMethods:
    """Checks that traced methods, code of traced functions, and classes in closures are unchanged."""

    def __init__(self, values: Iterable[Any], codes: Sequence[CodeType]) -> None:
        self._traced = set(codes)
        self._entries: dict[tuple[type, str], Any] = {}
        self._functions: dict[int, FunctionType] = {}
        self._cells: list[tuple[CellType, type]] = []
        self._kinds: set[type] = set()
        for value in values:
            self._enter_functions(_functions_in(value))
            for kind in (type(value), value) if isinstance(value, type) else (type(value),):
                self._enter_class(kind)
        methods = [(*key, method) for key, method in self._entries.items()]
        self._plain = [each for each in methods if getattr(each[0], each[1], None) is each[2]]
        self._others = [each for each in methods if getattr(each[0], each[1], None) is not each[2]]
        self._codes = [(function, function.__code__) for function in self._functions.values()]

    def _enter_class(self, kind: type) -> None:
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        having: dict[str, list[type]] = {}
        for base in kind.__mro__:
            if base.__flags__ & _FROM_PYTHON:
                for name, value in list(vars(base).items()):
                    if self._enter_functions(_functions_in(value)):
                        having.setdefault(name, []).append(base)
        for name, bases in having.items():
            for owner in _owners(kind, name, bases):
                self._entries[owner, name] = _looked_up(owner, name)

    def _enter_functions(self, functions: Iterable[FunctionType]) -> bool:
        traced = [function for function in functions if function.__code__ in self._traced]
        for function in traced:
            if id(function) not in self._functions:
                self._functions[id(function)] = function
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    content = _content(cell)
                    if isinstance(content, type) and content.__flags__ & _FROM_PYTHON:
                        if name != "__class__":  # the cell of super() never changes
                            self._cells.append((cell, content))  # Dynamo does not guard it
                        self._enter_class(content)
        return bool(traced)

    def hold(self) -> bool:
        for owner, name, method in self._plain:
            if getattr(owner, name, None) is not method:  # by far the fastest lookup
                return False
        for function, code in self._codes:
            if function.__code__ is not code:
                return False
        if self._cells and any(_content(cell) is not kind for cell, kind in self._cells):
            return False
        return not self._others or all(_looked_up(owner, name) is method for owner, name, method in self._others)

    def broken(self) -> str:
        """Describes the first change; may be empty."""
        for owner, name, method in (*self._plain, *self._others):
            if _looked_up(owner, name) is not method:
                return f"{owner.__name__}.{name} was replaced"
        for function, code in self._codes:
            if function.__code__ is not code:
                return f"the code of {function.__qualname__} was replaced"
        changed = (kind for cell, kind in self._cells if _content(cell) is not kind)
        return next((f"{kind.__qualname__} was replaced" for kind in changed), "")


def _owners(kind: type, name: str, traced_in: Sequence[type]) -> Sequence[type]:
    """The classes in which to watch a method: the class itself, or its MRO if ``super()`` may have been used."""
    first = next(base for base in kind.__mro__ if name in vars(base))
    if [first] == traced_in:
        return [kind]
    return [base for base in kind.__mro__ if base.__flags__ & _FROM_PYTHON]


def _functions_in(value: Any, depth: int = 4) -> Iterator[FunctionType]:
    if depth == 0:
        return
    # the fast path, for an undecorated function
    if type(value) is FunctionType and value.__closure__ is None and not value.__dict__:
        yield value
        return
    if isinstance(value, FunctionType):
        yield value
        around = [getattr(value, "__wrapped__", None), *map(_content, value.__closure__ or ())]
        around = [inner for inner in around if isinstance(inner, FunctionType | functools.partial)]
    elif isinstance(value, staticmethod | classmethod):
        around = [value.__func__]
    elif isinstance(value, property):
        around = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property | functools.partialmethod | functools.partial):
        around = [value.func]
    else:
        around = [_instance_attributes(value).get("__wrapped__")]
    for inner in around:
        yield from _functions_in(inner, depth - 1)


def _instance_attributes(value: Any) -> Mapping[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, Mapping) else {}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _looked_up(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        value = base.__dict__.get(name, _ABSENT)
        if value is not _ABSENT:
            return value
    return _ABSENT
