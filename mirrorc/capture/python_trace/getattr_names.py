"""Notes the names of attributes that code makes while it runs, as in ``getattr(self, f"scale_{i}")``."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

from torch import nn

from mirrorc.capture.python_trace.reflective_objects import WholeObjects

_WITHOUT_NAME = "vars"
_FUNCTIONS = ("getattr", "hasattr", "setattr", "delattr")


class MadeNames:
    """A block in which Python's functions that take the name of an attribute note it, where some code calls them.

    Args:
        codes: the code that counts, which may grow meanwhile.
        whole: is told of objects whose attributes are read without their names, by ``vars`` or ``getattr(self, "__dict__")``.

    Attributes:
        found: the names.
    """

    def __init__(self, codes: Collection[CodeType], whole: WholeObjects) -> None:
        self.found: set[str] = set()
        self._codes, self._whole = codes, whole
        self._before: dict[str, Any] = {}
        self._changed: list[tuple[Any, str, Any]] = []
        self._outer: FrameType | None = None

    def __enter__(self) -> MadeNames:
        self._outer = sys._getframe(2)  # of the block in which `PythonCalls` is entered
        self._before = {name: getattr(builtins, name) for name in (*_FUNCTIONS, _WITHOUT_NAME)}
        for name in _FUNCTIONS:
            setattr(builtins, name, self._noting(self._before[name], name in ("setattr", "delattr")))
        setattr(builtins, _WITHOUT_NAME, self._noting_whole(self._before[_WITHOUT_NAME]))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(builtins, name, function)
        self._outer = None

    def undo(self) -> None:
        """Puts back the attributes that were set or deleted so, but those that modules have set when they were imported."""
        while self._changed:
            value, name, before = self._changed.pop()
            if before is not _ABSENT:
                setattr(value, name, before)
            elif name in vars(value):
                delattr(value, name)

    def _noting(self, function: Callable[..., Any], changes: bool) -> Callable[..., Any]:
        def noted(value: Any, name: str, *rest: Any) -> Any:
            if (code := sys._getframe(1).f_code) in self._codes:
                self.found.add(name)
                self._whole.note_named(function.__name__, value, name, code)
                is_kept = isinstance(value, nn.Module) or not hasattr(value, "__dict__")
                if changes and not is_kept and not self._is_importing():
                    self._changed.append((value, name, vars(value).get(name, _ABSENT)))
            return function(value, name, *rest)

        return noted

    def _is_importing(self) -> bool:
        """Whether a module is being imported, which happens once."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._outer:
            if frame.f_code.co_name == "<module>":
                return True
            frame = frame.f_back
        return False

    def _noting_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*values: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code in self._codes:
                self._whole.note(values[0], frame.f_code) if values else self._whole.refuse(repr("vars"), frame.f_code)
            return function(*values) if values else frame.f_locals

        return noted


_ABSENT = object()
