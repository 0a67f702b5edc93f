"""Observes which code of the user's runs in a trace, and what it calls that could do something else in a later call."""

from __future__ import annotations

import collections
import contextvars
import gc
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from mirrorc.capture.python_trace.bytecode_names import globals_of, names_of
from mirrorc.capture.python_trace.code_owner import SAME_EACH_TIME, is_made_by_library, owner_of
from mirrorc.capture.python_trace.getattr_names import MadeNames
from mirrorc.capture.python_trace.reflective_objects import WholeObjects


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTIONS = _words(
    "abs all any ascii bin callable chr divmod format hash hex isinstance issubclass iter len max "
    "min next oct ord pow repr round sorted sum __build_class__ __import__"
)
"""Those of Python's builtin functions that give the same for the same objects."""

_MODULES = _words(
    "_abc _bisect _collections _functools _heapq _operator _sre _struct _typing _warnings cmath itertools math "
    "types typing"
)
"""The modules of Python, written in C, of which all functions do."""

_KINDS: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, memoryview),
    *(collections.OrderedDict, collections.deque, collections.defaultdict, re.Pattern, re.Match, type(vars(object))),
    *(type({}.keys()), type({}.values()), type({}.items()), BaseException),
)
"""The kinds of objects of which all methods do; what they hold is watched where it lasts."""

_LIBRARY = _words(
    "_collections_abc _weakrefset abc collections contextlib copy copyreg dataclasses enum fractions functools importlib inspect "
    "keyword logging numbers operator re reprlib string textwrap threading traceback types typing warnings weakref"
)
"""The modules of Python, written in Python, of which all functions do."""

ENVIRONMENT: type[Any] = type(os.environ)
"""The class of ``os.environ``, which keeps all that it holds in a dict."""

_READS_ENVIRONMENT = frozenset(
    function.__code__
    for function in (
        *(os.getenv, ENVIRONMENT.__getitem__, ENVIRONMENT.__iter__, ENVIRONMENT.__len__, ENVIRONMENT.copy),
        *(vars(os.environ)[name] for name in ("encodekey", "decodekey", "encodevalue", "decodevalue")),
    )
    if isinstance(function, FunctionType)
)
"""What reads the environment in Python's library: it counts as the user's code, so that what it names is watched."""

_TOLD = frozenset({"print", "warn", "warn_explicit"})
"""What is heard when it is called, and leaves nothing behind; so are the methods of loggers."""

_LEVELS = {
    name: getattr(logging, name.upper(), logging.ERROR)
    for name in ("debug", "info", "warning", "error", "exception", "critical")
}


@dataclass(frozen=True)
class ForeignCall:
    """A call of something that could give another result, or do something again, in a later step.

    Attributes:
        name: what is called.
        filename, lineno: where.
    """

    name: str
    filename: str
    lineno: int


class PythonCalls:
    """A block in which the calls of this thread are observed.

    Code is the user's if it is neither torch's, nor mirrorc's, nor of Python's own library.

    Attributes:
        codes: the user's code that has run, with the globals that it has.
        foreign: what it has called, directly or through Python's library, that need not be the same in each call.
        made_names: the names of attributes that it has made while it ran.
        whole: the objects whose attributes it has read without naming them.
        told: what it has called that is heard: ``print``, warnings and logging.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.foreign: dict[ForeignCall, None] = {}
        self.told: dict[ForeignCall, None] = {}
        self.whole = WholeObjects()
        self.made_names = MadeNames(self.codes.keys(), self.whole)
        self._before: Any = None
        self._heard: FrameType | None = None  # in which something is heard now, so that the rest is Python's

    def __enter__(self) -> PythonCalls:
        self.made_names.__enter__()
        self._before = sys.getprofile()
        sys.setprofile(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.setprofile(self._before)
        self.made_names.__exit__()

    @property
    def names(self) -> frozenset[str]:
        """The names of globals in all this code, and those of attributes and keys, with a dot before them."""
        of_globals = {name for code in self.codes for name in globals_of(code)}
        of_attributes = self.made_names.found.union(name for code in self.codes for name in names_of(code))
        return frozenset(of_globals.union(f".{name}" for name in of_attributes))

    def _observe(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if self._heard is not None:
            if frame is self._heard and event in ("return", "c_return", "c_exception"):
                self._heard = None
            return
        if event == "call":
            if code in self.codes:
                self.whole.note_frame(frame)
                return
            owner = owner_of(code.co_filename)
            if code in _READS_ENVIRONMENT or (
                owner is None and not is_made_by_library(code.co_filename, frame.f_globals)
            ):
                self.codes[code] = frame.f_globals
                self.whole.add_code(code, frame.f_globals, self.codes)
                self.whole.note_frame(frame)
            elif owner and owner not in (_LIBRARY | SAME_EACH_TIME):
                self._note_foreign(frame, f"{owner}.{code.co_name}")
            elif owner == "logging" and _is_heard(frame) and self._is_called_by_user(frame):
                self._note(self.told, frame.f_back, f"logging.{code.co_name}")
                self._heard = frame
        elif event == "c_call" and code in self.codes and not _is_same_each_time(called):
            name = getattr(called, "__qualname__", None) or repr(called)
            module = getattr(called, "__module__", None)
            is_heard = called.__name__ in _TOLD
            self._heard = frame if is_heard else None
            self._note(
                self.told if is_heard else self.foreign,
                frame,
                name if module in (None, "builtins") else f"{module}.{name}",
            )

    def _is_called_by_user(self, frame: FrameType) -> bool:
        return frame.f_back is not None and frame.f_back.f_code in self.codes

    def _note_foreign(self, frame: FrameType, name: str) -> None:
        """Notes a call of Python's library, if the user's code has made it."""
        back = frame.f_back
        while back is not None and owner_of(back.f_code.co_filename):
            back = back.f_back
        if back is not None and back.f_code in self.codes:
            self._note(self.foreign, back, name)

    def _note(self, found: dict[ForeignCall, None], frame: FrameType | None, name: str) -> None:
        if frame is not None and frame.f_code in self.codes:
            found[ForeignCall(name, frame.f_code.co_filename, frame.f_lineno)] = None


def _is_heard(frame: FrameType) -> bool:
    """Whether a call of a logger's method reaches its handlers."""
    name = frame.f_code.co_name
    if name not in _LEVELS and name != "log":
        return False
    logger, level = frame.f_locals.get("self"), _LEVELS.get(name, frame.f_locals.get("level"))
    return isinstance(logger, logging.Logger) and isinstance(level, int) and logger.isEnabledFor(level)


def functions_of(codes: Iterable[CodeType]) -> list[FunctionType]:
    """The functions that there are of some code, where that reads variables of closures."""
    wanted = {code for code in codes if code.co_freevars}
    if not wanted:
        return []
    return [one for one in gc.get_objects() if type(one) is FunctionType and one.__code__ in wanted]


def _is_same_each_time(called: Any) -> bool:
    """Whether a function that is written in C gives the same for the same objects, and changes nothing but them."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if name == "__new__":
        return True
    if isinstance(owner, ModuleType) or owner is None:
        module = str(getattr(called, "__module__", None) or getattr(owner, "__name__", ""))
        if module == "builtins":
            return name in _FUNCTIONS
        return (module in _MODULES and name not in _TOLD) or module.partition(".")[0] == "torch" or _is_of_numpy(module)
    kind = owner if isinstance(owner, type) else type(owner)
    if issubclass(kind, _KINDS) or kind is object:
        return True
    if kind.__module__ in ("_thread", "threading") and name in ("acquire", "release", "__enter__", "__exit__"):
        return True
    if kind is contextvars.ContextVar and name == "get":  # which is watched
        return True
    if issubclass(kind, torch.Generator):
        return False
    return (
        kind.__module__.partition(".")[0] == "torch" or issubclass(kind, torch.Tensor) or _is_of_numpy(kind.__module__)
    )


def _is_of_numpy(module: str) -> bool:
    return module.partition(".")[0] == "numpy" and not module.startswith("numpy.random")
