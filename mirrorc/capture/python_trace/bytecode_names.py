"""Finds the names in code: of globals, of attributes and keys, and of what it imports."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_MOST_CODES = 65536  # whose names are kept: what runs in a trace is looked at several times


def codes_in(code: CodeType) -> list[CodeType]:
    """Some code, and that of functions which it defines."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(own for one in nested for own in codes_in(one))]


@lru_cache(_MOST_CODES)
def globals_of(code: CodeType) -> frozenset[str]:
    """The names of globals in some code, and in functions that it defines."""
    return frozenset(
        str(instruction.argval)
        for one in codes_in(code)
        for instruction in dis.get_instructions(one)
        if instruction.opname in _OF_GLOBALS
    )


@lru_cache(_MOST_CODES)
def names_of(code: CodeType) -> frozenset[str]:
    """The names and the strings in some code, and in functions that it defines."""
    return frozenset(name for one in codes_in(code) for name in (*one.co_names, *strings_in(one.co_consts)))


def strings_in(constants: tuple[Any, ...] | frozenset[Any]) -> Iterator[str]:
    """The strings among constants, and in tuples of them, as those of patterns that match attributes by their names."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from strings_in(constant)


@lru_cache(_MOST_CODES)
def imports_of(code: CodeType) -> tuple[str, ...]:
    """The names of modules that some code imports, and functions that it defines, with leading dots where they have any."""
    found: dict[str, None] = {}
    for one in codes_in(code):
        before: list[Any] = [0, None]  # what an import finds on the stack: the number of dots, and the names
        for instruction in dis.get_instructions(one):
            if instruction.opname == "IMPORT_NAME":
                found["." * (before[0] or 0) + str(instruction.argval)] = None
            before = [before[1], instruction.argval]
    return tuple(found)
