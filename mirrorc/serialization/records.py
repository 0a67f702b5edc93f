"""Dataclasses as Python expressions, by the declared types of their fields: ``Device(name="cpu:0", ...)``.

Fields with their default value are left out. A member of an enum is its bare name; a dtype is its short name.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from mirrorc.printing.printed_values import dtype_name
from mirrorc.serialization.literals import DTYPES, TextError, argument_of, argument_text, keywords_of, no_value

_PLAIN = (str, int, bool, float)
_WIDTH = 120
_INDENT = "    "


@functools.cache
def field_types(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


@functools.cache
def defaults(record: Any) -> dict[str, Any]:
    fields = dataclasses.fields(record)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | made


def record_text(value: Any, kind: Any, title: str, indent: str = "") -> str:
    """The text of a value of the declared type ``kind``: a dataclass, or the type of a field. It may take several
    lines.
    """
    origin, inner = _parts(kind)
    deeper = indent + _INDENT
    if origin is types.UnionType:
        return "None" if value is None else record_text(value, inner, title, indent)
    if origin is tuple:
        items = [
            record_text(item, inner, f"{title}[{i}]", deeper) for i, item in enumerate(_expect(value, tuple, title))
        ]
        return _joined("[", items, "]", indent)
    if origin is Mapping:
        items = [
            f"{argument_text(_expect(key, str, f'a key of {title}'), _refused)}: "
            f"{record_text(item, inner, f'{title}[{key!r}]', deeper)}"
            for key, item in value.items()
        ]
        return _joined("{", items, "}", indent)
    if dataclasses.is_dataclass(kind):
        _expect(value, typing.cast(type, kind), title)
        record: Any = type(value)
        fields, by_default = field_types(record), defaults(record)
        held = {name: getattr(value, name) for name in fields}
        items = [
            f"{name}={record_text(item, fields[name], f'{title}.{name}', deeper)}"
            for name, item in held.items()
            if name not in by_default or type(item) is not type(by_default[name]) or item != by_default[name]
        ]
        return _joined(f"{record.__name__}(", items, ")", indent)
    if kind is float:
        return argument_text(float(value), _refused)
    checked = _expect(value, kind, title)
    if kind in _PLAIN:
        return argument_text(checked, _refused)
    if kind is torch.dtype:
        return dtype_name(checked)
    return argument_text(str(checked), _refused) if kind is torch.device else str(checked.name)


def _joined(begin: str, items: list[str], end: str, indent: str) -> str:
    line = f"{begin}{', '.join(items)}{end}"
    if len(indent) + len(line) <= _WIDTH and "\n" not in line:
        return line
    return "".join([begin, "\n", *(f"{indent}{_INDENT}{item},\n" for item in items), indent, end])


def record_of(node: ast.expr, kind: Any, title: str) -> Any:
    """Inverts `record_text`."""
    origin, inner = _parts(kind)
    if origin is types.UnionType:
        is_none = isinstance(node, ast.Constant) and node.value is None
        return None if is_none else record_of(node, inner, title)
    if origin is tuple:
        items = _expect_node(node, ast.List, f"{title} is a list", node).elts
        return tuple([record_of(item, inner, f"{title}[{i}]") for i, item in enumerate(items)])
    if origin is Mapping:
        return {key: record_of(value, inner, f"{title}[{key!r}]") for key, value in _named_items(node, title)}
    if dataclasses.is_dataclass(kind):
        return _dataclass_of(node, kind, title)
    if kind in _PLAIN:
        value = argument_of(node, no_value)
        if type(value) is not kind:
            raise TextError(f"{title} is {value!r:.60}, not of type {kind.__name__}", node)
        return value
    if kind is torch.device:
        try:
            return torch.device(record_of(node, str, title))
        except RuntimeError:
            raise TextError(f"{title}: there is no device {ast.unparse(node):.60}", node) from None
    members: Mapping[str, Any] = DTYPES if kind is torch.dtype else kind.__members__
    if not isinstance(node, ast.Name) or node.id not in members:
        raise TextError(f"{title} is {ast.unparse(node):.60}, not one of {', '.join(members)}", node)
    return members[node.id]


def _named_items(node: ast.expr, title: str) -> list[tuple[str, ast.expr]]:
    table = _expect_node(node, ast.Dict, f"{title} is a dict", node)
    items = [
        (record_of(key, str, f"a key of {title}") if key else "", value)
        for key, value in zip(table.keys, table.values, strict=True)
    ]
    if len(dict(items)) < len(items) or None in table.keys:
        raise TextError(f"{title} has a key twice", node)
    return items


def _dataclass_of(node: ast.expr, kind: Any, title: str) -> Any:
    name = kind.__name__
    call = _expect_node(node, ast.Call, f"{title} is a {name}(...)", node)
    if not isinstance(call.func, ast.Name) or call.func.id != name or call.args:
        raise TextError(f"{title} is a {name}(FIELD=VALUE, ...)", node)
    fields, given = field_types(kind), keywords_of(call)
    for field, part in given.items():
        if field not in fields:
            raise TextError(f"{name} has no {field!r:.60}, only {', '.join(fields)}", part)
    missing = [field for field in fields if field not in given and field not in defaults(kind)]
    if missing:
        raise TextError(f"{title} lacks {', '.join(missing)}", node)
    values = {field: record_of(part, fields[field], f"{title}.{field}") for field, part in given.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise TextError(f"{title}: {error}", node) from None


_Node = typing.TypeVar("_Node", bound=ast.expr)


def _expect_node(node: ast.expr, kind: type[_Node], expected: str, where: ast.AST) -> _Node:
    if not isinstance(node, kind):
        raise TextError(f"{expected}; this is {ast.unparse(node):.60}", where)
    return node


def _expect(value: Any, kind: type, title: str) -> Any:
    if type(value) is not kind:
        raise TextError(f"{title} is {value!r:.60}, not of type {kind.__name__}")
    return value


def _refused(value: Any) -> str:
    raise TextError(f"{value!r:.60} has no text")


@functools.cache
def _parts(kind: Any) -> tuple[Any, Any]:
    """The origin and the ``X`` of ``X | None``, ``tuple[X, ...]`` or ``Mapping[str, X]``; (None, None) for other types."""
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType and len(parameters) == 2 and parameters[1] is type(None):
        return origin, parameters[0]
    if origin is tuple and len(parameters) == 2 and parameters[1] is Ellipsis:
        return origin, parameters[0]
    if origin is Mapping and parameters[0] is str:
        return origin, parameters[1]
    is_known = kind in (*_PLAIN, torch.dtype, torch.device) or dataclasses.is_dataclass(kind)
    assert is_known or issubclass(kind, enum.Enum), f"{kind} has no text yet"
    return None, None
