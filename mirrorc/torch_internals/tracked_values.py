"""Compares what a tracer's variables stand for with the Python objects that were there before the trace."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

MISSING = object()
"""In place of what is not there."""


def content_of(variable: Any) -> Any:
    """The variable of the plain container in that of a kind of dict or list, such as a defaultdict; else the same."""
    inner = (getattr(variable, name, None) for name in ("_base_vt", "_dict_vt", "_list_vt"))
    return next((content for content in inner if content is not None), variable)


def changed_items(variable: Any, real: Any, scope: Mapping[str, Any]) -> list[str]:
    """The parts of a container that have changed."""
    if not isinstance(real, list | dict | set | deque):
        return ["["]
    if not isinstance(real, dict) or not isinstance(getattr(variable, "items", None), dict):
        return [] if is_same(variable, real, scope) else ["["]
    found = _items_of(variable)
    if found is None:
        return ["["]
    keys = [key for key in {**found, **real} if not is_same(found.get(key), real.get(key, MISSING), scope)]
    return [f"[{key!r}]" for key in keys]


def _items_of(variable: Any) -> dict[Any, Any] | None:
    """The items of a tracer's dict or set; None if a key has no value while it is traced."""
    keys = {key: key.vt.realize() if hasattr(key.vt, "realize") else key.vt for key in variable.items}
    if not all(key.is_python_constant() for key in keys.values()):
        return None
    return {keys[key].as_python_constant(): value for key, value in variable.items.items()}


def attribute_of(real: Any, key: str) -> Any:
    """What an object has by this name, or its class; `MISSING` if there is none."""
    own = getattr(real, "__dict__", {})
    return own[key] if key in own else getattr(real, key, MISSING)


def is_same(variable: Any, real: Any, scope: Mapping[str, Any]) -> bool:
    """Whether a tracer's variable stands for what is there already."""
    if real is MISSING or variable is None:
        return False
    if hasattr(variable, "is_realized"):
        if not variable.is_realized():  # nobody has looked at it
            return bool(variable.peek_value() is real)
        variable = variable.realize()
    if isinstance(real, list | tuple | deque) and hasattr(variable, "items") and isinstance(variable.items, list):
        pairs = zip(variable.items, real, strict=False)
        return len(variable.items) == len(real) and all(is_same(v, r, scope) for v, r in pairs)
    if isinstance(real, dict | set) and isinstance(getattr(variable, "items", None), dict):
        found = _items_of(variable)
        if found is None or found.keys() != set(real):
            return False
        return not isinstance(real, dict) or all(is_same(found[key], real[key], scope) for key in found)
    if getattr(variable, "is_python_constant", lambda: False)():
        value = variable.as_python_constant()
        return type(value) is type(real) and repr(value) == repr(real)
    name = source_name(variable)
    return bool(name) and evaluated(name, scope) is real


def source_name(variable: Any) -> str:
    """The expression that reads what a tracer's variable stands for; empty if it is new."""
    source = getattr(variable, "source", None)
    return str(source.name) if source is not None else ""


def evaluated(name: str, scope: Mapping[str, Any]) -> Any:
    """What an expression reads now; `MISSING` if it reads nothing."""
    with contextlib.suppress(Exception):
        return eval(name, dict(scope)) if name else MISSING
    return MISSING
