"""Finds the modules that code imports while it runs, as in ``from settings import FACTOR`` within a function; and their files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from mirrorc.capture.python_trace.bytecode_names import imports_of


def imported_by(code: CodeType, its_globals: dict[str, Any]) -> Iterator[ModuleType]:
    """The modules that some code imports, and functions that it defines, as far as they have been imported already.

    Args:
        code: the code.
        its_globals: its globals, whose package names imports with leading dots.
    """
    for name in imports_of(code):
        package = its_globals.get("__package__") or ""
        full = importlib.util.resolve_name(name, package) if name.startswith(".") else name
        for path in dict.fromkeys((full.partition(".")[0], full)):
            if isinstance(module := sys.modules.get(path), ModuleType):
                yield module


def file_of(module: ModuleType) -> str:
    """Where a module was read from; something in angle brackets for modules of Python in C, and those that users have made."""
    is_pythons = module.__name__.partition(".")[0] in sys.stdlib_module_names
    return getattr(module, "__file__", None) or ("<frozen builtins>" if is_pythons else "<made>")
