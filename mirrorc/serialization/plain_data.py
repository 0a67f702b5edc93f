"""Converts arguments of nodes to JSON data and back; refuses other values.

The form of an argument::

    argument = null | true | false | INTEGER | NUMBER | STRING
             | [INDEX]                                        a node or a tensor, by its number
             | ["list", argument ...] | ["tuple", argument ...] | ["dict", [key, argument] ...]
             | ["slice", start, stop, step] | ["float", "nan"] | ["complex", real, imaginary]
             | ["dtype", NAME] | ["device", NAME] | ["layout", NAME] | ["memory_format", NAME]
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx


class DataError(Exception):
    """A value cannot be saved or read. The caller adds the file's name and a remedy."""


def expect(data: Any, kind: type, title: str) -> Any:
    """Raises `DataError` unless the data's type is exactly ``kind``."""
    if type(data) is not kind:
        raise DataError(f"{title} is {data!r:.60}, not of type {kind.__name__}")
    return data


def expect_identifier(data: Any, title: str) -> str:
    """Raises `DataError` for other data: torch.fx writes some strings of a graph into code."""
    if type(data) is not str or not data.isidentifier() or keyword.iskeyword(data):
        raise DataError(f"{title} is {data!r:.60}, not an identifier")
    return data


def entry(table: Mapping[str, Any] | list[Any], key: Any, title: str) -> Any:
    """Raises `DataError` if the dict or list has no such entry."""
    keys = range(len(table)) if isinstance(table, list) else table
    if type(key) not in (int, str) or key not in keys:
        raise DataError(f"there is no {title} {key!r:.60}")
    return table[key]


_Leaf = Callable[[Any], Any]


def encode_argument(value: Any, refer: _Leaf) -> Any:
    """``refer`` converts nodes and tensors, or raises `DataError`."""
    encode = _ENCODERS.get(type(value))
    return encode(value, refer) if encode is not None else refer(value)


def decode_argument(data: Any, resolve: _Leaf) -> Any:
    """Inverts `encode_argument`; ``resolve`` inverts ``refer``. Raises `DataError` for other data."""
    if type(data) is not list:
        return _decode_plain(data)
    decode = _DECODERS.get(data[0]) if data and type(data[0]) is str else None
    if decode is None:
        return resolve(data)
    try:
        return decode(data[1:], resolve)
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{data!r:.60} stands for no argument") from error


def _decode_plain(data: Any) -> Any:
    if type(data) is dict:
        raise DataError(f"{data!r:.60} stands for no argument")
    return data


_BY_NAME: dict[type, dict[str, Any]] = {
    kind: {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, kind)}
    for kind in (torch.dtype, torch.layout, torch.memory_format)
}


def encode_name(value: torch.dtype | torch.layout | torch.memory_format | torch.device) -> str:
    return str(value).removeprefix("torch.")


def decode_name(name: Any, kind: type, title: str) -> Any:
    """The device or torch constant of this name and ``kind``; raises `DataError` if there is none."""
    if kind is not torch.device:
        return entry(_BY_NAME[kind], name, title)
    try:
        return torch.device(expect(name, str, title))
    except (RuntimeError, ValueError) as error:
        raise DataError(f"there is no {title} {name!r:.60}") from error


def _encode_float(value: float, refer: _Leaf) -> Any:
    return value if math.isfinite(value) else ["float", repr(value)]


def _encode_items(tag: str) -> Callable[[Any, _Leaf], Any]:
    return lambda value, refer: [tag, *[encode_argument(item, refer) for item in value]]


def _encode_dict(value: Mapping[Any, Any], refer: _Leaf) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise DataError(f"a dict has the key {key!r:.60}, and only strings and integers can be saved as keys")
    return ["dict", *[[key, encode_argument(item, refer)] for key, item in value.items()]]


def _encode_parts(tag: str, *parts: str) -> Callable[[Any, _Leaf], Any]:
    return lambda value, refer: [tag, *[encode_argument(getattr(value, part), refer) for part in parts]]


_ENCODERS: dict[type, Callable[[Any, _Leaf], Any]] = {
    **dict.fromkeys((type(None), bool, int, str), lambda value, refer: value),
    float: _encode_float,
    complex: _encode_parts("complex", "real", "imag"),
    slice: _encode_parts("slice", "start", "stop", "step"),
    **dict.fromkeys((list, fx.immutable_collections.immutable_list), _encode_items("list")),
    **dict.fromkeys((tuple, torch.Size), _encode_items("tuple")),
    **dict.fromkeys((dict, fx.immutable_collections.immutable_dict), _encode_dict),
    torch.dtype: lambda value, refer: ["dtype", encode_name(value)],
    torch.layout: lambda value, refer: ["layout", encode_name(value)],
    torch.memory_format: lambda value, refer: ["memory_format", encode_name(value)],
    torch.device: lambda value, refer: ["device", encode_name(value)],
}


def _decode_items(items: list[Any], resolve: _Leaf) -> list[Any]:
    return [decode_argument(item, resolve) for item in items]


def _decode_dict(items: list[Any], resolve: _Leaf) -> dict[Any, Any]:
    decoded = {}
    for key, item in items:
        if type(key) not in (str, int):
            raise DataError(f"{key!r:.60} is no key")
        decoded[key] = decode_argument(item, resolve)
    return decoded


def _decode_slice(items: list[Any], resolve: _Leaf) -> slice:
    start, stop, step = _decode_items(items, resolve)
    return slice(start, stop, step)


def _decode_complex(items: list[Any], resolve: _Leaf) -> complex:
    real, imaginary = _decode_items(items, resolve)
    return complex(expect(real, float, "a real part"), expect(imaginary, float, "an imaginary part"))


def _decode_float(items: list[Any], resolve: _Leaf) -> float:
    (name,) = items
    return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[name])


def _decode_named(kind: type) -> Callable[[list[Any], _Leaf], Any]:
    def decode(items: list[Any], resolve: _Leaf) -> Any:
        (name,) = items
        return decode_name(name, kind, kind.__name__)

    return decode


_DECODERS: dict[str, Callable[[list[Any], _Leaf], Any]] = {
    "float": _decode_float,
    "complex": _decode_complex,
    "slice": _decode_slice,
    "list": _decode_items,
    "tuple": lambda items, resolve: tuple(_decode_items(items, resolve)),
    "dict": _decode_dict,
    **{kind.__name__: _decode_named(kind) for kind in (*_BY_NAME, torch.device)},
}
