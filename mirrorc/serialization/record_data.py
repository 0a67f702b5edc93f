"""Converts dataclasses to JSON data and back, by the declared types of their fields."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from mirrorc.serialization.plain_data import DataError, decode_name, encode_name, entry, expect

_PLAIN = (str, int, bool, float)
_NAMED = (torch.dtype, torch.device)


@functools.cache
def field_types(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def encode_record(value: Any, kind: Any, title: str) -> Any:
    """Converts a value by its declared type ``kind``: a dataclass, or the type of a dataclass's field.

    Raises:
        DataError: the value is of another type.
    """
    origin, inner = _parts(kind)
    if origin is types.UnionType:
        return None if value is None else encode_record(value, inner, title)
    if origin is tuple:
        return [encode_record(item, inner, f"{title}[{i}]") for i, item in enumerate(value)]
    if origin is Mapping:
        items = value.items()
        return {
            expect(key, str, f"a key of {title}"): encode_record(item, inner, f"{title}[{key!r}]")
            for key, item in items
        }
    if _is_record(kind):
        return {
            name: encode_record(getattr(value, name), hint, f"{title}.{name}")
            for name, hint in field_types(kind).items()
        }
    if kind is float:
        return float(value)
    checked = expect(value, kind, title)
    if kind in _PLAIN:
        return checked
    if kind in _NAMED:
        return encode_name(checked)
    return checked.value if issubclass(kind, enum.StrEnum) else checked.name


def decode_record(data: Any, kind: Any, title: str) -> Any:
    """Inverts `encode_record`; raises `DataError` for other data."""
    origin, inner = _parts(kind)
    if origin is types.UnionType:
        return None if data is None else decode_record(data, inner, title)
    if origin is tuple:
        return tuple(decode_record(item, inner, f"{title}[{i}]") for i, item in enumerate(expect(data, list, title)))
    if origin is Mapping:
        items = expect(data, dict, title).items()
        return {key: decode_record(item, inner, f"{title}[{key!r}]") for key, item in items}
    if _is_record(kind):
        fields = field_types(kind)
        check_keys(data, fields, title)
        return kind(**{name: decode_record(data[name], hint, f"{title}.{name}") for name, hint in fields.items()})
    if kind in _NAMED:
        return decode_name(data, kind, title)
    if kind in _PLAIN:
        return expect(data, kind, title)
    members = {member.value: member for member in kind} if issubclass(kind, enum.StrEnum) else kind.__members__
    return entry(members, data, title)


def check_keys(data: Any, wanted: Mapping[str, Any], title: str) -> None:
    """Raises `DataError` unless the data is a dict with exactly the keys of ``wanted``."""
    expect(data, dict, title)
    for key in wanted:
        if key not in data:
            raise DataError(f"{title} has no {key!r}")
    for key in data:
        if key not in wanted:
            raise DataError(f"{title} has {key!r:.60}, which is unknown")


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


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
    is_known = kind in (*_PLAIN, *_NAMED) or _is_record(kind) or issubclass(kind, enum.Enum)
    assert is_known, f"{kind} has no form in a file yet"
    return None, None
