"""Expressions in the text of programs, errors in them, and arguments of nodes: ``[x, 1.5]``, ``torch.float32``."""

from __future__ import annotations

import ast
import json
import keyword
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.printing.printed_values import dtype_name


class TextError(Exception):
    """A value without a text form, or a malformed text. The caller adds the file's name and a remedy.

    Attributes:
        node: the wrong part of the text; its position is relative to the parsed part.
        line, column: the error's position in the text, from 1 and 0; None if not known yet.
    """

    def __init__(self, reason: str, node: ast.AST | None = None, line: int | None = None, column: int = 0) -> None:
        super().__init__(reason)
        self.node, self.line, self.column = node, line, column

    def at(self, first_line: int, indent: int = 0) -> TextError:
        """Sets the position of the error: its node was parsed from a text that begins at this line and column."""
        if self.line is None:
            offset = getattr(self.node, "lineno", 1) - 1
            self.line = first_line + offset
            self.column = getattr(self.node, "col_offset", 0) + (indent if offset == 0 else 0)
        return self


class UnknownOperatorError(TextError):
    """Raised if this process has no operator of this name."""


def expression(text: str) -> ast.expr:
    """Parses a Python expression. Nothing in it is run."""
    body: ast.expr = _parsed(text, "eval").body
    return body


def assignment(text: str) -> tuple[str, ast.expr]:
    """Parses ``NAME = EXPRESSION``."""
    statement = _parsed(text, "exec").body[:1]
    if not statement or not isinstance(statement[0], ast.Assign) or not isinstance(statement[0].targets[0], ast.Name):
        raise TextError("here comes a table 'NAME = ...' or a function, with @shard, @mirrored, @device or @region")
    return statement[0].targets[0].id, statement[0].value


def _parsed(text: str, mode: str) -> Any:
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        where = ast.Name(id="", lineno=error.lineno or 1, col_offset=max(0, (error.offset or 1) - 1))
        raise TextError(f"this is no expression: {error.msg}", where) from None
    except ValueError as error:
        raise TextError(f"this cannot be read: {error}") from None


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """The keyword arguments of a call. Raises `TextError` for repeated keywords and ``**``."""
    given: dict[str, ast.expr] = {}
    for part in call.keywords:
        if part.arg is None or part.arg in given:
            raise TextError(f"{part.arg} is given twice" if part.arg else "'**' stands for no keyword", part)
        given[part.arg] = part.value
    return given


_CONSTANTS: dict[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}
DTYPES: Mapping[str, torch.dtype] = {
    dtype_name(value): value for value in _CONSTANTS.values() if isinstance(value, torch.dtype)
}


def quoted(text: str) -> str:
    """A string's literal, in ASCII."""
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()


def number_text(number: float) -> str:
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def identifier(name: Any, title: str) -> str:
    """Raises `TextError` for other strings, because torch.fx writes some strings of a graph into code."""
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
        raise TextError(f"{title} is {name!r:.60}, not an identifier")
    return name


def argument_text(value: Any, leaf: Callable[[Any], str]) -> str:
    """``leaf`` prints nodes and tensors, or raises `TextError`."""
    write = _WRITERS.get(type(value))
    return write(value, leaf) if write is not None else leaf(value)


def _key_text(key: Any) -> str:
    if type(key) not in (str, int):
        raise TextError(f"a dict has the key {key!r:.60}, and only strings and integers can be saved as keys")
    return quoted(key) if type(key) is str else str(key)


def _tuple_text(value: Any, leaf: Callable[[Any], str]) -> str:
    items = [argument_text(item, leaf) for item in value]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _constant_text(value: Any, leaf: Callable[[Any], str]) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python writes no integer of thousands of digits
        raise TextError(str(error)) from error


_WRITERS: dict[type, Callable[[Any, Callable[[Any], str]], str]] = {
    **dict.fromkeys((type(None), bool, int, torch.dtype, torch.layout, torch.memory_format), _constant_text),
    str: lambda value, leaf: quoted(value),
    float: lambda value, leaf: number_text(value),
    complex: lambda value, leaf: f"complex({number_text(value.real)}, {number_text(value.imag)})",
    torch.device: lambda value, leaf: f"device({quoted(str(value))})",
    slice: lambda value, leaf: (
        f"slice({', '.join(argument_text(part, leaf) for part in (value.start, value.stop, value.step))})"
    ),
    **dict.fromkeys(
        (list, fx.immutable_collections.immutable_list),
        lambda value, leaf: f"[{', '.join(argument_text(item, leaf) for item in value)}]",
    ),
    **dict.fromkeys((tuple, torch.Size), _tuple_text),
    **dict.fromkeys(
        (dict, fx.immutable_collections.immutable_dict),
        lambda value, leaf: (
            f"{{{', '.join(f'{_key_text(key)}: {argument_text(item, leaf)}' for key, item in value.items())}}}"
        ),
    ),
}


def argument_of(node: ast.expr, leaf: Callable[[ast.expr], Any]) -> Any:
    """Inverts `argument_text`; ``leaf`` is the inverse of its ``leaf``."""
    read = _READERS.get(type(node))
    return read(node, leaf) if read is not None else leaf(node)


def no_value(node: ast.expr) -> Any:
    raise TextError(f"{ast.unparse(node):.60} stands for no value", node)


def _constant(node: ast.Constant, leaf: Callable[[ast.expr], Any]) -> Any:
    if type(node.value) not in (type(None), bool, int, float, str):
        raise TextError(f"{node.value!r:.60} stands for no argument", node)
    return node.value


def _negative(node: ast.UnaryOp, leaf: Callable[[ast.expr], Any]) -> Any:
    value = node.operand.value if isinstance(node.operand, ast.Constant) else None
    if not isinstance(node.op, ast.USub) or type(value) not in (int, float):
        raise TextError("only numbers are negative", node)
    return -value  # type: ignore[operator]


def _dict(node: ast.Dict, leaf: Callable[[ast.expr], Any]) -> dict[Any, Any]:
    items = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = argument_of(key, leaf) if isinstance(key, ast.Constant | ast.UnaryOp) else None
        if type(name) not in (str, int):
            raise TextError("a key is a string or an integer", key or node)
        if name in items:
            raise TextError(f"the key {name!r:.60} is given twice", key or node)
        items[name] = argument_of(value, leaf)
    return items


def _attribute(node: ast.Attribute, leaf: Callable[[ast.expr], Any]) -> Any:
    if isinstance(node.value, ast.Name) and node.value.id == "torch":
        if node.attr not in _CONSTANTS:
            raise TextError(f"there is no torch.{node.attr:.60}", node)
        return _CONSTANTS[node.attr]
    return leaf(node)


def _call(node: ast.Call, leaf: Callable[[ast.expr], Any]) -> Any:
    make = _CALLS.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if make is None or node.keywords:
        return leaf(node)
    arguments = [argument_of(argument, leaf) for argument in node.args]
    try:
        return make(*arguments)
    except (TypeError, ValueError, RuntimeError, LookupError):
        raise TextError(f"{ast.unparse(node):.60} stands for no argument", node) from None


def _complex(real: float, imaginary: float) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError
    return complex(real, imaginary)


_CALLS: dict[str, Callable[..., Any]] = {
    "float": lambda name: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[name],
    "complex": _complex,
    "slice": lambda start, stop, step: slice(start, stop, step),
    "device": torch.device,
}
_READERS: dict[type, Callable[[Any, Callable[[ast.expr], Any]], Any]] = {
    ast.Constant: _constant,
    ast.UnaryOp: _negative,
    ast.List: lambda node, leaf: [argument_of(item, leaf) for item in node.elts],
    ast.Tuple: lambda node, leaf: tuple([argument_of(item, leaf) for item in node.elts]),
    ast.Dict: _dict,
    ast.Attribute: _attribute,
    ast.Call: _call,
}
