"""Code that reads attributes without naming them: of which variables' objects, or that it does not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mirrorc.capture.python_trace.reflective_reads import whole_reads


class Reads:
    """Reads its own attributes."""

    def by_dict(self) -> Any:
        return self.__dict__.get("x")

    def by_super(self, name: str) -> Any:
        return super().__getattribute__(name)

    def by_object(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def by_object_with_a_constant(self) -> Any:
        return object.__getattribute__(self, "x")

    def by_itself(self, name: str) -> Any:
        return self.__getattribute__(name)

    def in_a_generator(self) -> Any:
        return all(self.__dict__[name] for name in "ab")


def of_a_variable(x: Any) -> Any:
    y = x
    return y.__dict__


def of_an_assigned_argument(x: Any) -> Any:
    x = x.inner
    return x.__dict__


def of_a_choice(x: Any, y: Any) -> Any:
    return (x if x.chosen else y).__dict__


def of_an_attribute(x: Any) -> Any:
    return x.inner.__dict__


def of_a_class(x: Any) -> Any:
    return type(x).__dict__


def of_what_is_assigned_within(x: Any) -> Any:
    def assign() -> None:
        nonlocal x
        x = x.inner

    assign()
    return x.__dict__


def assigns(x: Any) -> None:
    x.__dict__ = {}


def deletes(x: Any) -> None:
    del x.__dict__


def of_an_attribute_by_object(x: Any, name: str) -> Any:
    return object.__getattribute__(x.inner, name)


def of_another_class(x: Any, name: str) -> Any:
    return Reads.__getattribute__(x, name)


def by_a_pattern(x: Any) -> Any:
    match x:
        case Reads(__dict__=found):
            return found


def by_a_string() -> Any:
    return "__getattribute__"


@pytest.mark.parametrize(("name", "finds_in_class", "builtins"), [
    ("by_dict", False, ()),
    ("by_super", True, ("super",)),
    ("by_object", True, ("object",)),
    ("by_object_with_a_constant", True, ("object",)),
    ("by_itself", True, ()),
])  # fmt: skip
def test_what_a_method_reads_of_itself_is_told(name: str, finds_in_class: bool, builtins: tuple[str, ...]) -> None:
    found = whole_reads(getattr(Reads, name).__code__)
    assert (found.untold, found.variables, found.builtins) == ("", (("self", finds_in_class),), builtins)


def test_an_argument_of_the_function_around_is_told_if_that_is_known() -> None:
    around = Reads.in_a_generator.__code__
    within = [code for code in around.co_consts if hasattr(code, "co_code")]
    assert [whole_reads(code, [around]).variables for code in within] == [(("self", False),)]
    assert [whole_reads(code).untold for code in within] == ["__dict__"]


UNTOLD = (
    *(of_a_variable, of_an_assigned_argument, of_a_choice, of_an_attribute, of_a_class, of_what_is_assigned_within),
    *(assigns, deletes, of_an_attribute_by_object, of_another_class, by_a_pattern, by_a_string),
)


@pytest.mark.parametrize("function", UNTOLD)
def test_what_is_read_of_other_objects_is_not_told(function: Callable[..., Any]) -> None:
    assert whole_reads(function.__code__).untold in ("__dict__", "__getattribute__")


def test_code_that_names_what_it_reads_reads_nothing_whole() -> None:
    found = whole_reads((lambda model: model.scale + getattr(model, "__dict__")["x"]).__code__)  # noqa: B009 - getattr notes it
    assert (found.untold, found.variables) == ("", ())
