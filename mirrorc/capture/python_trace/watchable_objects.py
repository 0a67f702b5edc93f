"""Which Python objects can be watched: what they hold, or that they never change."""

from __future__ import annotations

import abc
import collections
import contextvars
import enum
import functools
import logging
import re
import sys
import threading
import types
from typing import Any

import torch
from torch import nn

from mirrorc.capture.python_trace.code_owner import is_watched_file
from mirrorc.user.restore import can_keep_value

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""The kinds of objects that are what they are by their value alone."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which modules keep their hooks."""

_TORCHS_OWN = frozenset(vars(nn.Module()))
_CONTAINERS = (collections.OrderedDict, collections.defaultdict, dict, collections.deque, list, set, frozenset, tuple)
_LASTING = frozenset({
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias, types.UnionType, types.CodeType),
    *(range, slice, object, property, type(Ellipsis), type(NotImplemented), re.Pattern, functools._lru_cache_wrapper),
    *(type(threading.Lock()), type(threading.RLock()), type(vars(abc.ABC)["_abc_impl"])),
})  # fmt: skip
_IS_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which some classes of C have as well
_MOST_OWN_BYTES, _BYTES_OF_SLOT = 16, 8
"""What an instance of a class of Python has beyond its base: a dict, and a list of weak references; and what a slot takes."""


def is_lasting(value: Any) -> bool:
    """Whether an object stays what it is, as far as code reads it."""
    if isinstance(value, type | types.ModuleType | enum.Enum | logging.Logger) or type(value) in _LASTING:
        return True
    return type(value).__module__.partition(".")[0] == "typing"


def is_value(value: Any) -> bool:
    """Whether a tensor is one of numbers in memory, of a class of torch's own."""
    return type(value) in (torch.Tensor, nn.Parameter) and can_keep_value(value)


def contents_of(value: Any) -> list[Any] | None:
    """The containers in which an object keeps all that it holds; None if it may keep something elsewhere, as those of C do."""
    kind, base = type(value), next((own for own in _CONTAINERS if isinstance(value, own)), object)
    attributes = OwnDict(value).get("", None)  # whatever its class says where it is asked
    own = [value] if base is not object else []
    num_own_bytes = _MOST_OWN_BYTES + _BYTES_OF_SLOT * len(_slots_of(kind))
    is_hidden = kind.__basicsize__ > base.__basicsize__ + num_own_bytes or not all(map(_is_open, kind.__mro__))
    if is_hidden or not (own or isinstance(attributes, dict) or _slots_of(kind)):
        return [] if _is_torchs(kind) else None
    return [*own, attributes] if isinstance(attributes, dict) else own


def _is_open(kind: type) -> bool:
    """Whether instances keep what a class adds to its bases in a dict and in slots, as those of Python's classes do."""
    if kind is object or kind in _CONTAINERS:
        return True
    slots = vars(kind).get("__slots__", ())
    names = {slots} if isinstance(slots, str) else set(slots)
    num_read = sum(type(value) is types.MemberDescriptorType for value in vars(kind).values())
    return bool(kind.__flags__ & _IS_MADE_IN_PYTHON) and len(names - {"__dict__", "__weakref__"}) == num_read


def _slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """What reads the slots of a class of Python's and those of its bases."""
    own = (base for base in kind.__mro__ if "__slots__" in vars(base))
    return tuple(value for base in own for value in vars(base).values() if type(value) is types.MemberDescriptorType)


def slots_of(value: Any) -> list[Slot]:
    """The slots of an object, as of one whose class has ``__slots__``."""
    return [Slot(value, slot) for slot in _slots_of(type(value))]


def _is_torchs(kind: type) -> bool:
    return (
        kind.__module__.partition(".")[0] == "torch"
        and kind is not torch.Generator
        and not issubclass(kind, torch.Tensor)
    )


def _base_of(container: Any) -> Any:
    """The container's own class below those of the user, whose methods may do anything."""
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))


def copy_of(container: Any) -> Any:
    """What is in a container now."""
    base = _base_of(container)
    return dict(base.items(container)) if isinstance(container, dict) else list(base.__iter__(container))


def holds_same(container: Any, content: Any) -> bool:
    """Whether a container holds what it held: the very objects, or equal plain values."""
    base = _base_of(container)
    if base.__len__(container) != len(content):
        return False
    if isinstance(container, set | frozenset):
        return all(base.__contains__(container, item) for item in content)
    if isinstance(content, dict):
        for (key, value), (own_key, found) in zip(content.items(), base.items(container), strict=True):
            if (found is not value and not is_equal(found, value)) or (own_key is not key and own_key != key):
                return False  # one after the other: code may go by their order
        return True
    return all(a is b or is_equal(a, b) for a, b in zip(base.__iter__(container), content, strict=True))


def refill(container: Any, content: Any) -> None:
    """Puts back what a container held; one that nothing can change has it."""
    base = _base_of(container)
    if base in (tuple, frozenset) or holds_same(container, content):
        return
    base.clear(container)
    (base.extend if base in (list, collections.deque) else base.update)(container, content)


def tables_of(module: nn.Module) -> list[Any]:
    """The dicts in which a module keeps its parameters, buffers, submodules and hooks."""
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules", *HOOKS) if name in vars(module)]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What else a module has, and whether it is in train mode."""
    return {key: value for key, value in vars(module).items() if key not in _TORCHS_OWN or key == "training"}


def is_equal(one: Any, other: Any) -> bool:
    """Whether two objects are one, or plain values that nothing tells apart."""
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and repr(one) == repr(other))


def function_behind(value: Any) -> Any:
    """The function that is called where a class has this."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property | functools.cached_property):
        return value.fget if isinstance(value, property) else value.func
    return value


def called_by(value: Any) -> list[Any] | None:
    """What a method, or a function that others make of one, calls, and with what; None for anything else."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return [value.__wrapped__] if isinstance(value, functools._lru_cache_wrapper) else None


class Cell:
    """A variable of a closure, read and written as a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, key: str, default: Any) -> Any:
        """What it holds."""
        try:
            return self._cell.cell_contents
        except ValueError:  # not assigned yet
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value


class Slot:
    """A slot of an object, read and written as a mapping."""

    def __init__(self, owner: Any, slot: types.MemberDescriptorType) -> None:
        self._owner, self._slot = owner, slot

    def get(self, key: str, default: Any) -> Any:
        """What it holds."""
        try:
            return self._slot.__get__(self._owner)
        except AttributeError:  # not assigned yet
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        self._slot.__set__(self._owner, value)


class Variable:
    """A context variable as it is here, read and written as a mapping."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def get(self, key: str, default: Any) -> Any:
        """What it holds; its own default if it holds nothing."""
        try:
            return self._variable.get()
        except LookupError:
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        self._variable.set(value)


class OwnDict:
    """The dict in which an object keeps its attributes, read and written as a mapping."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, key: str, default: Any) -> Any:
        """The dict."""
        try:
            return object.__getattribute__(self._owner, "__dict__")
        except AttributeError:  # its class has slots alone
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self._owner, "__dict__", value)


class Attributes:
    """The attributes of an object that no dict has, read and written as a mapping."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, key: str, default: Any) -> Any:
        """What an attribute holds."""
        return getattr(self._owner, key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._owner, key, value)


def is_users_class(kind: type) -> bool:
    """Whether attributes of a class may be assigned by the user."""
    functions = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    if functions:
        return any(is_watched_file(function.__code__.co_filename) for function in functions)
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names | {"torch"}
