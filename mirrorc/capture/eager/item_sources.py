"""Iterators, files and queues, from which each replica would take other items."""

from __future__ import annotations

import functools
import io
import operator
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

from mirrorc.capture.diagnostics.python_effects import users_place
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "mirrorc"} - {"collections", "__main__"}
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
_QUEUES = (queue.Queue, queue.SimpleQueue)


def is_users_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


class Source(NamedTuple):
    """The location of an iterator, file or queue, maybe within a tuple or a partial function."""

    name: str
    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], object]


class Refusing:
    """A substitute for an iterator, file or queue, or a method of one. Other threads still use the original."""

    def __init__(self, name: str, model_name: str, threads: Collection[int], original: Any) -> None:
        self.__dict__.update(original=original, _name=name, _model_name=model_name, _threads=threads)

    def _in_other_threads(self) -> Any:
        if threading.get_ident() in self._threads:
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {self._model_name} uses {self._name}, a {type(self.original).__name__}",
                "replicas would share it, each would take other items, and a call that fails could not put them back",
                "item = next(items) in your loop, and pass it as an argument",
                at=users_place(traceback.extract_stack()),
            )
        return self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._in_other_threads(), name)

    def __iter__(self) -> Any:
        return iter(self._in_other_threads())

    def __next__(self) -> Any:
        return next(self._in_other_threads())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_other_threads()(*args, **kwargs)


def _is_source(value: Any) -> bool:
    kind = type(value)
    is_source = hasattr(kind, "__next__") or issubclass(kind, (*_QUEUES, io.IOBase))
    return is_source and not is_users_class(kind)


def stand_in_for(value: Any, refusing: Callable[[Any], Refusing]) -> Any:
    kind = type(value)
    if _is_source(value) or (kind in _METHODS and _is_source(value.__self__)):
        return refusing(value)
    if kind is tuple:
        items = tuple(stand_in_for(item, refusing) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if kind is functools.partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        function, *others = stand_ins = [stand_in_for(part, refusing) for part in parts]
        if all(map(operator.is_, stand_ins, parts)):
            return value
        args, named = others[: len(value.args)], others[len(value.args) :]
        return functools.partial(function, *args, **dict(zip(value.keywords, named, strict=True)))
    return value
