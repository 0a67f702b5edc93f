"""Notes the names of attributes that code makes while it runs, as in ``getattr(self, f"scale_{i}")``."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

from torch import nn

_FUNCTIONS = ("getattr", "hasattr", "setattr", "delattr")


class MadeNames:
    """A block in which Python's functions that take the name of an attribute note it, where some code calls them.

    Args:
        codes: the code that counts, which may grow meanwhile.

    Attributes:
        found: the names.
    """

    def __init__(self, codes: Collection[CodeType]) -> None:
        self.found: set[str] = set()
        self._codes = codes
        self._before: dict[str, Any] = {}
        self._changed: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> MadeNames:
        self._before = {name: getattr(builtins, name) for name in _FUNCTIONS}
        for name, function in self._before.items():
            setattr(builtins, name, self._noting(function, name in ("setattr", "delattr")))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(builtins, name, function)

    def undo(self) -> None:
        """Puts back the attributes that were set or deleted so."""
        while self._changed:
            value, name, before = self._changed.pop()
            if before is not _ABSENT:
                setattr(value, name, before)
            elif name in vars(value):
                delattr(value, name)

    def _noting(self, function: Callable[..., Any], changes: bool) -> Callable[..., Any]:
        def noted(value: Any, name: str, *rest: Any) -> Any:
            if sys._getframe(1).f_code in self._codes:
                self.found.add(name)
                if changes and not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
                    self._changed.append((value, name, vars(value).get(name, _ABSENT)))
            return function(value, name, *rest)

        return noted


_ABSENT = object()
