"""Finds the modules that code imports while it runs, as in ``from settings import FACTOR`` within a function; and their files."""

from __future__ import annotations

import dis
import importlib.util
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from mirrorc.capture.python_calls import codes_in


def imported_by(code: CodeType, its_globals: dict[str, Any]) -> Iterator[ModuleType]:
    """The modules that some code imports, and functions that it defines, as far as they have been imported already.

    Args:
        code: the code.
        its_globals: its globals, whose package names imports with leading dots.
    """
    for one in codes_in(code):
        before: list[Any] = [0, None]  # what an import finds on the stack: the number of dots, and the names
        for instruction in dis.get_instructions(one):
            if instruction.opname == "IMPORT_NAME":
                name = "." * (before[0] or 0) + str(instruction.argval)
                package = its_globals.get("__package__") or ""
                full = importlib.util.resolve_name(name, package) if name.startswith(".") else name
                for path in dict.fromkeys((full.partition(".")[0], full)):
                    if isinstance(module := sys.modules.get(path), ModuleType):
                        yield module
            before = [before[1], instruction.argval]


def file_of(module: ModuleType) -> str:
    """Where a module was read from; something in angle brackets for modules of Python in C, and those that users have made."""
    is_pythons = module.__name__.partition(".")[0] in sys.stdlib_module_names
    return getattr(module, "__file__", None) or ("<frozen builtins>" if is_pythons else "<made>")
