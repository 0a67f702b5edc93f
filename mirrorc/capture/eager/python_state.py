"""Python state that forward and loss can change: attributes, collections, closures, globals, classes and generators."""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
import sys
import sysconfig
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from mirrorc.capture.eager.shared_sources import Refusing, Source, is_users_class, stand_in_for, states_of
from mirrorc.capture.model.function_module import ABSENT, content_of_cell, global_names, used_globals
from mirrorc.user.restore import (
    PLAIN,
    SavedValue,
    are_equal,
    can_keep_value,
    content_of,
    is_collection,
    put_back_after,
    refill,
    requires_gradient,
    restored,
    run_all,
    slots_of,
)

_OF_MODULES = frozenset(vars(nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")
_CALLABLES = (FunctionType, MethodType, functools.partial, staticmethod, classmethod)
_BUILT_IN = sysconfig.get_path("stdlib")
_MOST_ITEMS = 10_000
"""Longer collections are not restored; only a change of their length is detected."""
_LARGEST_COPY = 16 * 2**20
"""Larger tensors and arrays, in bytes, are not restored; only a change of a tensor's version is detected."""


@dataclass(frozen=True)
class _Place:
    """A location that can change. ``write`` restores a value of ``read``.

    Attributes:
        kind: "state", which a step can continue; "memory", a tensor or array that is written in place; or "draws".
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    kind: str = "state"
    before: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.read())

    def has_changed(self, now: Any) -> bool:
        if self.kind == "state":
            if _is_unchanged(now, self.before):
                return False
            return not self.name.endswith(".") or bool(self.change_to(now))  # the order of attributes is not state
        return not are_equal(now, self.before)

    def put_back(self) -> None:
        if self.has_changed(self.read()):
            self.write(self.before)

    def change_to(self, now: Any) -> Any:
        if not (isinstance(now, dict) and isinstance(self.before, dict)):
            return now
        each = {key: (now.get(key, ABSENT), self.before.get(key, ABSENT)) for key in (*now, *self.before)}
        return {key: value for key, (value, before) in each.items() if not _is_same_item(value, before)}

    def name_of(self, change: Any) -> str:
        if not (isinstance(change, dict) and isinstance(self.before, dict) and change):
            return self.name.removesuffix(".")
        key = next(iter(change))
        return self.name + (str(key) if self.name.endswith(".") else f"[{key!r}]")


def _is_unchanged(now: Any, before: Any) -> bool:
    if _is_same_item(now, before):
        return True
    if isinstance(now, dict) and isinstance(before, dict):
        return _is_unchanged([*now, *now.values()], [*before, *before.values()])
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, list) and isinstance(before, list):
        is_same = len(now) == len(before) and all(map(operator.is_, now, before))
        return is_same or (len(now) == len(before) and all(map(_is_same_item, now, before)))
    return False


def _is_same_item(now: Any, before: Any) -> bool:
    if now is before or (type(now) is Refusing and now.original is before):
        return True
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(map(_is_same_item, now, before))
    if type(now) is functools.partial and type(before) is functools.partial:
        return _is_same_item((now.func, *now.args), (before.func, *before.args))
    return isinstance(now, PLAIN) and are_equal(now, before)


@dataclass(frozen=True)
class Changes:
    """The changes of a run: new values by location."""

    left: Mapping[int, Any] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.left or self.written or self.drawn)

    @property
    def a_name(self) -> str:
        return next(iter((*self.names.values(), *self.written, *self.drawn)))

    @property
    def with_gradient(self) -> str | None:
        """The name of a location with a new tensor that requires a gradient; or None."""
        return next((self.names[place] for place, now in self.left.items() if requires_gradient(now)), None)

    def differing(self, other: Changes) -> str | None:
        """The name of a location that two runs have changed differently; or None."""
        for place in (*self.left, *other.left):
            mine, others = self.left.get(place, ABSENT), other.left.get(place, ABSENT)
            if mine is ABSENT or others is ABSENT or not are_equal(mine, others):
                return self.names.get(place) or other.names[place]
        return None


class PythonState:
    """Python state within reach of forward and loss: their modules, functions, closures, and the globals in their code.

    The search leaves out functions and classes of installed packages, and objects of torch, numpy and Python.
    """

    def __init__(self, root: nn.Module) -> None:
        search = _Search(root)
        self.root = root
        self._places, self._sources = search.places, search.sources
        self._stand_ins: list[tuple[Source, Any]] = []

    def changes(self) -> Changes:
        changed = [(n, place, now) for n, place in enumerate(self._places) if place.has_changed(now := place.read())]
        left = {n: place.change_to(now) for n, place, now in changed if place.kind == "state"}
        return Changes(
            left,
            {n: self._places[n].name_of(change) for n, change in left.items()},
            tuple(place.name for _, place, _ in changed if place.kind == "memory"),
            tuple(place.name for _, place, _ in changed if place.kind == "draws"),
        )

    @property
    def actions(self) -> list[Callable[[], object]]:
        return [place.put_back for place in self._places]

    def put_back(self) -> None:
        run_all([*self.actions, *(functools.partial(source.write, stand_in) for source, stand_in in self._stand_ins)])

    def refuse_sources(self, model_name: str, threads: Collection[int]) -> None:
        """Makes iterators, files and queues raise an error in these threads, because taken items could not be put back."""
        self._stand_ins = [
            (source, stand_in_for(source.value, functools.partial(Refusing, source.name, model_name, threads)))
            for source in self._sources
        ]
        for source, stand_in in self._stand_ins:
            source.write(stand_in)

    def give_sources_back(self) -> None:
        for source, stand_in in self._stand_ins:
            if source.read() is stand_in:  # else forward has put something else there
                source.write(source.value)
        self._stand_ins = []


@contextlib.contextmanager
def restored_state(root: nn.Module) -> Iterator[None]:
    """Undoes a block's changes to parameters and buffers, and to the Python state within reach of forward."""
    values = [SavedValue(parameter).put_back for parameter in root.parameters() if can_keep_value(parameter)]
    with restored(root), put_back_after([*PythonState(root).actions, *values]):
        yield


class _Search:
    def __init__(self, root: nn.Module) -> None:
        self.places: list[_Place] = []
        self.sources: list[Source] = []
        modules = dict(root.named_modules())
        variables = (*root.parameters(), *root.buffers())
        self._seen: dict[int, object] = {id(value): value for value in (*modules.values(), *variables)}
        self._waiting: list[tuple[Any, str]] = []
        self._globals: set[tuple[int, str]] = set()
        for name, module in modules.items():
            self._visit_object(module, name)
        while self._waiting:
            self._visit(*self._waiting.pop())

    def _found(self, value: Any, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        if stand_in_for(value, functools.partial(Refusing, name, "", ())) is not value:
            self.sources.append(Source(name, value, read, write))
        if not isinstance(value, PLAIN):
            self._waiting.append((value, name))

    def _add(self, *place: Any) -> None:
        self.places.append(_Place(*place))

    def _visit(self, value: Any, name: str) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self._add_tensor(value, name)
        elif issubclass(kind, np.ndarray):
            if value.nbytes <= _LARGEST_COPY:
                self._add(name, value.copy, functools.partial(_fill_array, value), "memory")
            if value.dtype.hasobject:
                self._waiting += [(item, f"an item of {name}") for item in value.flat]
        elif issubclass(kind, bytearray | array):
            self._add(name, lambda: value[:], functools.partial(value.__setitem__, slice(None)), "memory")
        elif (states := states_of(value)) is not None:
            self._add(f"{name}, a {kind.__module__.replace('._C', '')}.{kind.__name__}", *states, "draws")
        elif issubclass(kind, type):
            file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
            if is_users_class(value) and _is_users_file(file):
                self._visit_class(value)
        elif is_collection(value):
            self._visit_collection(value, name)
            if is_users_class(kind):
                self._visit_object(value, name)
        elif issubclass(kind, tuple | frozenset):
            self._waiting += [(item, f"{name}[{i}]") for i, item in enumerate(value)]
        elif kind is FunctionType:
            self._visit_function(value)
        elif issubclass(kind, functools.partial):
            self._waiting += [(value.func, name), (value.args, name), (value.keywords, name)]
        elif kind is MethodType:
            self._waiting += [(value.__func__, name), (value.__self__, name)]
        elif issubclass(kind, staticmethod | classmethod):
            self._waiting.append((value.__func__, name))
        elif issubclass(kind, property):
            self._waiting += [(function, name) for function in (value.fget, value.fset) if function is not None]
        elif issubclass(kind, nn.Module | SimpleNamespace) or is_users_class(kind):
            self._visit_object(value, name)
        elif hasattr(value, "__wrapped__"):
            self._waiting.append((value.__wrapped__, name))

    def _visit_collection(self, value: Any, name: str, *, is_of_object: bool = False, is_place: bool = True) -> None:
        if len(value) > _MOST_ITEMS:
            self._add(name, functools.partial(len, value), lambda _: None, "memory")
            return
        if is_place:
            self._add(name, functools.partial(content_of, value), functools.partial(refill, value))
        if isinstance(value, dict):
            for key, item in content_of(value).items():
                if is_of_object and key in _TABLES:  # of a module, whose copies notice what is replaced
                    self._waiting += [(member, f"{name}{of_table}") for of_table, member in item.items()]
                    continue
                if is_of_object and key in _OF_MODULES and not item:
                    continue
                of_item = f"{name}{key}" if is_of_object else f"{name}[{key!r}]"
                read, write = functools.partial(dict.get, value, key), functools.partial(dict.__setitem__, value, key)
                self._found(item, of_item, read, write)
        elif isinstance(value, list | deque):
            for i, item in enumerate(content_of(value)):
                self._found(item, f"{name}[{i}]", *_entry_of(value, i))
        else:
            self._waiting += [(item, f"an item of {name}") for item in content_of(value)]

    def _visit_object(self, value: Any, name: str) -> None:
        with contextlib.suppress(AttributeError):  # objects with slots alone have none
            attributes = object.__getattribute__(value, "__dict__")
            is_place = type(value).__module__.partition(".")[0] != "mirrorc"
            self._visit_collection(attributes, f"{name}.", is_of_object=True, is_place=is_place)
        for slot in slots_of(type(value)):

            def read(slot: Any = slot) -> Any:
                try:
                    return slot.__get__(value)
                except AttributeError:
                    return ABSENT

            def write(content: Any, slot: Any = slot) -> None:
                with contextlib.suppress(AttributeError):  # it is empty
                    slot.__delete__(value)
                if content is not ABSENT:
                    slot.__set__(value, content)

            self._add_variable(f"{name}.{slot.__name__}", read, write)
        if not isinstance(value, type):
            self._waiting.append((type(value), type(value).__name__))

    def _visit_class(self, kind: type) -> None:
        def read() -> dict[str, Any]:
            return {key: value for key, value in vars(kind).items() if not key.startswith("__")}

        def write(content: dict[str, Any]) -> None:
            now = read()
            for key in now.keys() - content.keys():
                type.__delattr__(kind, key)
            for key, value in content.items():
                if now.get(key, ABSENT) is not value:
                    type.__setattr__(kind, key, value)

        self._add(f"{kind.__name__}.", read, write)
        for key, value in vars(kind).items():
            is_method = isinstance(value, FunctionType | staticmethod | classmethod | property)
            if is_method or not key.startswith("__"):
                write_entry = functools.partial(type.__setattr__, kind, key)
                self._found(value, f"{kind.__name__}.{key}", functools.partial(vars(kind).get, key), write_entry)
        self._waiting += [(base, base.__name__) for base in kind.__bases__]

    def _visit_function(self, function: FunctionType) -> None:
        if not _is_users_file(function.__code__.co_filename):  # a decorator's, perhaps, around one of the user's
            cells = [content_of_cell(cell) for cell in function.__closure__ or ()]
            self._waiting += [(content, function.__name__) for content in cells if isinstance(content, _CALLABLES)]
            return
        code, outside = function.__code__, function.__globals__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                read, write = functools.partial(content_of_cell, cell), functools.partial(_fill_cell, cell)
                self._add_variable(variable, read, write)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._waiting += [(value, f"a default of {function.__name__}") for value in defaults]
        self._visit_collection(vars(function), f"{function.__name__}.", is_of_object=True)
        for name in used_globals(code):
            self._visit_global(outside, name, name, set(global_names(code)))

    def _visit_global(self, table: dict[str, Any], key: str, name: str, names: Set[str]) -> None:
        value = table.get(key, ABSENT)
        if isinstance(value, ModuleType):
            if _is_users_file(getattr(value, "__file__", None) or _BUILT_IN):
                for attribute in (names & vars(value).keys()) - {key}:
                    self._visit_global(vars(value), attribute, f"{value.__name__}.{attribute}", names - {key})
            return
        if (id(table), key) in self._globals or (value is ABSENT and hasattr(builtins, key)):
            return
        self._globals.add((id(table), key))

        def write(value: Any) -> None:
            if value is ABSENT:
                table.pop(key, None)
            else:
                table[key] = value

        self._add_variable(name, lambda: table.get(key, ABSENT), write)

    def _add_variable(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._add(name, read, write)
        if (value := read()) is not ABSENT:
            self._found(value, name, read, write)

    def _add_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.is_inference():  # inference tensors have no versions
            return
        if not can_keep_value(tensor) or tensor.nbytes > _LARGEST_COPY:
            self._add(name, lambda: tensor._version, lambda _: None, "memory")
            return
        saved = SavedValue(tensor)
        self._add(name, lambda: saved.has_changed, lambda _: saved.put_back(), "memory")


def _entry_of(items: Any, i: int) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: items[i] if i < len(items) else ABSENT, functools.partial(type(items).__setitem__, items, i)


def _fill_array(values: Any, content: Any) -> None:
    if values.shape != content.shape:
        values.resize(content.shape, refcheck=False)
    values[...] = content


def _fill_cell(cell: CellType, content: Any) -> None:
    if content is ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = content


_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, torch.__path__[0])


@functools.cache
def _is_users_file(path: str) -> bool:
    """False for files of the standard library, torch and installed packages. True for code in a string."""
    return not path.startswith(_INSTALLED) and "site-packages" not in path
