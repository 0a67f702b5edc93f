"""Finds of which variables' objects code reads attributes without naming them, as in ``self.__dict__[key]``."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from mirrorc.capture.python_trace.bytecode_names import codes_in, strings_in

DICT, LOOKUP = "__dict__", "__getattribute__"
_WORDS = (DICT, LOOKUP)
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_CLOSURE = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_WITHOUT_EFFECT = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "NOP", "RESUME", "EXTENDED_ARG"})


@dataclass(frozen=True)
class WholeReads:
    """What some code reads without naming it.

    Attributes:
        variables: the arguments whose objects' attributes it reads so, those of the function around it among them, each with
            whether it may find what their classes have as well.
        builtins: the functions of Python's that must be themselves for that to be so.
        untold: by what it reads so of other objects, which the code does not tell; empty if it does not.
    """

    variables: tuple[tuple[str, bool], ...] = ()
    builtins: tuple[str, ...] = ()
    untold: str = ""


@dataclass(frozen=True)
class _Deed:
    """An instruction; one that does two things is two.

    Attributes:
        name: what it does.
        value: with what.
        is_entered: whether it is run after another one than that which stands before it.
    """

    name: str
    value: object
    is_entered: bool

    @property
    def variable(self) -> str | None:
        """The variable that it reads, if it does."""
        is_load = self.name.startswith("LOAD_FAST") or self.name in _CLOSURE
        return str(self.value) if is_load and self.name != "LOAD_FAST_AND_CLEAR" else None


def whole_reads(code: CodeType, around: Iterable[CodeType] = ()) -> WholeReads:
    """What some code reads without naming it, apart from the functions that it defines.

    Args:
        code: the code.
        around: the code that may define it, for variables of closures.
    """
    spoken = {
        *strings_in(tuple(constant for constant in code.co_consts if constant != DICT))
    }  # getattr notes that word
    untold = next((word for word in _WORDS if word in spoken), "")
    if untold or not any(word in code.co_names for word in _WORDS):
        return WholeReads(untold=untold)
    variables: dict[tuple[str, bool], None] = {}
    builtins: dict[str, None] = {}
    deeds = [*_deeds(code)]
    for place, deed in enumerate(deeds):
        if deed.value not in _WORDS or deed.name == "LOAD_CONST":
            continue
        found, builtin = _read(deeds, place, code) if deed.name in _ATTRIBUTES else (None, "")
        if found is None or not _is_argument(found, code, around):
            return WholeReads(untold=str(deed.value))
        variables[found, deed.value == LOOKUP] = None
        builtins.update(dict.fromkeys([builtin] if builtin else []))
    return WholeReads(tuple(variables), tuple(builtins))


def _deeds(code: CodeType) -> Iterator[_Deed]:
    """The instructions that do something."""
    is_entered = False
    for instruction in dis.get_instructions(code):
        is_entered |= instruction.is_jump_target
        if instruction.opname in _WITHOUT_EFFECT:
            continue
        name, value = instruction.opname.replace("_BORROW", ""), instruction.argval
        if name.count("_FAST") == 2:  # such as LOAD_FAST_LOAD_FAST
            first, _, second = name.partition("_FAST_")
            yield _Deed(f"{first}_FAST", value[0], is_entered)
            yield _Deed(second, value[1], False)
        else:
            yield _Deed(name, value, is_entered)
        is_entered = False


def _read(deeds: Sequence[_Deed], place: int, code: CodeType) -> tuple[str | None, str]:
    """The variable whose object is read at a place, and the function of Python's by which it is; None if it cannot be told."""
    before = [*deeds[max(place - 2, 0) : place]]
    if deeds[place].is_entered or not before:
        return None, ""
    if deeds[place].name == "LOAD_SUPER_ATTR":
        return before[-1].variable, "super"
    if before[-1].variable is not None:
        return before[-1].variable, ""
    if _is_call(before[-1], 0) and not before[-1].is_entered and _is_global(before[-2:-1], "super"):
        return code.co_varnames[0] if code.co_argcount else None, "super"
    if deeds[place].value == LOOKUP and _is_global(before[-1:], "object"):
        after = [*deeds[place + 1 : place + 4]]
        is_plain = len(after) == 3 and not any(deed.is_entered for deed in after) and _is_call(after[2], 2)
        if is_plain and (after[1].variable is not None or after[1].name == "LOAD_CONST"):
            return after[0].variable, "object"
    return None, ""


def _is_call(deed: _Deed, num_arguments: int) -> bool:
    return deed.name == "CALL" and deed.value == num_arguments


def _is_global(deeds: Sequence[_Deed], name: str) -> bool:
    return any(deed.name == "LOAD_GLOBAL" and deed.value == name for deed in deeds)


def _is_argument(name: str, code: CodeType, around: Iterable[CodeType]) -> bool:
    """Whether a variable is what the code, or all code around it that has run, was called with from its beginning to its end."""
    if name not in code.co_freevars:
        return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] and not _is_stored(name, code)
    owners = [own for own in around if code in own.co_consts]
    return bool(owners) and all(name not in own.co_freevars and _is_argument(name, own, ()) for own in owners)


def _is_stored(name: str, code: CodeType) -> bool:
    """Whether some code, or a function that it defines, assigns or deletes a variable of this name."""
    return any(
        deed.value == name
        for one in codes_in(code)
        for deed in _deeds(one)
        if deed.name.startswith(("STORE_", "DELETE_"))
    )
