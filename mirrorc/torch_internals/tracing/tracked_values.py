"""Compares a tracer's variables with Python objects from before the trace, and with containers that the trace has built."""

from __future__ import annotations

import contextlib
import operator
import re
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

MISSING = object()


def content_of(variable: Any) -> Any:
    """The inner variable of a dict or list subclass; otherwise the variable itself."""
    inner = (getattr(variable, name, None) for name in ("_base_vt", "_dict_vt", "_list_vt"))
    return next((content for content in inner if content is not None), variable)


def changed_items(variable: Any, real: Any, scope: Mapping[str, Any]) -> list[str]:
    if not isinstance(real, list | dict | set | deque):
        return ["["]
    if not isinstance(real, dict) or not isinstance(getattr(variable, "items", None), dict):
        return [] if is_same(variable, real, scope) else ["["]
    items = _items_of(variable)
    if items is None:
        return ["["]
    keys = [key for key in {**items, **real} if not is_same(items.get(key), real.get(key, MISSING), scope)]
    return [f"[{key!r}]" for key in keys]


def _items_of(variable: Any) -> dict[Any, Any] | None:
    keys = {key: key.vt.realize() if hasattr(key.vt, "realize") else key.vt for key in variable.items}
    if not all(key.is_python_constant() for key in keys.values()):
        return None
    return {keys[key].as_python_constant(): value for key, value in variable.items.items()}


def attribute_of(real: Any, key: str) -> Any:
    attributes = getattr(real, "__dict__", {})
    return attributes[key] if key in attributes else getattr(real, key, MISSING)


def is_same(variable: Any, real: Any, scope: Mapping[str, Any]) -> bool:
    if real is MISSING or variable is None:
        return False
    if hasattr(variable, "is_realized"):
        if not variable.is_realized():  # forward has not looked at it
            return bool(variable.peek_value() is real)
        variable = variable.realize()
    if isinstance(real, list | tuple | deque) and hasattr(variable, "items") and isinstance(variable.items, list):
        pairs = zip(variable.items, real, strict=False)
        return len(variable.items) == len(real) and all(is_same(v, r, scope) for v, r in pairs)
    if isinstance(real, dict | set) and isinstance(getattr(variable, "items", None), dict):
        items = _items_of(variable)
        if items is None or items.keys() != set(real):
            return False
        return not isinstance(real, dict) or all(is_same(items[key], real[key], scope) for key in items)
    if getattr(variable, "is_python_constant", lambda: False)():
        value = variable.as_python_constant()
        return type(value) is type(real) and repr(value) == repr(real)
    name = source_name(variable) or _written_in_place(variable)
    return bool(name) and evaluated(name, scope) is real


def _written_in_place(variable: Any) -> str:
    from torch._dynamo.variables import TensorVariable

    if not isinstance(variable, TensorVariable):
        return ""
    node: Any = variable.as_proxy().node
    while _writes_its_first(node):
        node = node.args[0]
    source = getattr(node, "_dynamo_source", None)  # an input
    return str(source.name) if source is not None else ""


def _writes_its_first(node: Any) -> bool:
    if node.op == "call_method":
        return bool(_METHOD_IN_PLACE.fullmatch(node.target))
    return node.op == "call_function" and node.target in _OPERATORS_IN_PLACE and isinstance(node.args[0], fx.Node)


_METHOD_IN_PLACE = re.compile(r"[a-z][a-z0-9_]*[a-z0-9]_")
_OPERATORS_IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)


def source_name(variable: Any) -> str:
    """The expression that reads a variable's object; empty for a new object."""
    source = getattr(variable, "source", None)
    return str(source.name) if source is not None else ""


def evaluated(name: str, scope: Mapping[str, Any]) -> Any:
    """`MISSING` if the expression raises an error."""
    with contextlib.suppress(Exception):
        return eval(name, dict(scope)) if name else MISSING
    return MISSING


def stand_in(variable: Any, scope: Mapping[str, Any]) -> Any:
    """A variable's object, with stand-ins for new tensors; `MISSING` if unknown."""
    if hasattr(variable, "is_realized"):
        if not variable.is_realized():
            return variable.peek_value()
        variable = variable.realize()
    real = evaluated(source_name(variable), scope)
    if real is not MISSING:
        return real
    if variable.is_python_constant():
        return variable.as_python_constant()
    with contextlib.suppress(Exception):  # no tensor
        return _tensor_like(variable.as_proxy().node.meta["example_value"])
    items = getattr(variable, "items", None)
    kind = variable.python_type() if isinstance(items, list | dict) else None
    if kind not in (list, tuple, dict):
        return MISSING
    held = items_of(variable, kind(), scope)
    return held if held is MISSING else kind(held)


def items_of(variable: Any, real: Any, scope: Mapping[str, Any]) -> Any:
    """A container's new items as a list, or a dict if ``real`` is one; `MISSING` if unknown."""
    items = getattr(variable, "items", None)
    if isinstance(items, list) and isinstance(real, list | tuple | deque):
        held = [stand_in(item, scope) for item in items]
        return MISSING if any(item is MISSING for item in held) else held
    by_key = _items_of(variable) if isinstance(items, dict) and isinstance(real, dict | set) else None
    if by_key is None:
        return MISSING
    if isinstance(real, set):
        return list(by_key)
    values = {key: stand_in(value, scope) for key, value in by_key.items()}
    return MISSING if any(value is MISSING for value in values.values()) else values


def replace_items(real: Any, items: Iterable[Any]) -> None:
    """Bypasses methods of a subclass. ``items`` is a dict if the container is one."""
    base: Any = next(base for base in (list, deque, OrderedDict, dict, set) if isinstance(real, base))
    base.clear(real)
    if isinstance(items, dict):
        for key, value in items.items():
            base.__setitem__(real, key, value)
    elif base is set:
        set.update(real, items)
    else:
        base.extend(real, items)


def _tensor_like(example: torch.Tensor) -> torch.Tensor:
    element = torch.zeros((), dtype=example.dtype, device=example.device)
    return element.expand(tuple(int(size) for size in example.shape)).requires_grad_(example.requires_grad)


class MadeContainer(NamedTuple):
    """The initial state of a container built by the tracer.

    Attributes:
        items: a list's items, or a dict's keys and values, in order; None for other kinds.
    """

    output: Any
    variable: Any
    items: Sequence[Any] | None
    attributes: Mapping[str, Any]


class ChangedContainer(NamedTuple):
    """A container that forward has changed.

    Attributes:
        position: the number of containers built earlier.
    """

    position: int
    stack: Sequence[traceback.FrameSummary]
    only_loses: bool


def made_container(output: Any, variable: Any) -> MadeContainer:
    return MadeContainer(output, variable, _listed_items(variable), _attributes_of(variable, output.side_effects))


def changed_containers(made: Sequence[MadeContainer], effects: Any) -> list[ChangedContainer]:
    changed = []
    recorded = getattr(effects, "mutation_user_stacks", {})
    of_this_attempt = [container for container in made if container.output.side_effects is effects]
    for index, container in enumerate(of_this_attempt):
        variable, before = container.variable, container.items
        after = _without_defaults(variable, before, _listed_items(variable))
        attributes = [*_attributes_of(variable, effects).items()]
        has_same_attributes = _are_same([*container.attributes.items()], attributes)
        if not has_same_attributes or not _are_same(before, after):
            stacks = recorded.get(content_of(variable)) or recorded.get(variable) or [[]]
            changed.append(ChangedContainer(index, list(stacks[-1]), has_same_attributes and _is_part(after, before)))
    return changed


def _without_defaults(variable: Any, before: Sequence[Any] | None, items: Sequence[Any] | None) -> Sequence[Any] | None:
    """Without the items that reads add to a defaultdict, because the next read adds them again."""
    factory = _realized(getattr(variable, "default_factory", None))
    if before is None or items is None:
        return items
    if hasattr(factory, "is_realized") and not factory.is_realized():
        make = factory.peek_value()
    else:
        make = factory.as_python_constant() if _is_constant(factory) else None
    if make not in (int, float, str, bool, list, dict, set, tuple):
        return items
    keys = {key for key, _ in before}
    return [(key, value) for key, value in items if key in keys or not _is_default(value, make)]


def _is_default(variable: Any, make: type) -> bool:
    variable = _realized(variable)
    if _is_constant(variable):
        value = variable.as_python_constant()
        return type(value) is make and bool(value == make())
    held = getattr(content_of(variable), "items", None)
    return isinstance(held, list | dict) and not held and variable.python_type() is make


def _is_part(items: Sequence[Any] | None, of: Sequence[Any] | None) -> bool:
    if items is None or of is None:
        return False
    others = iter(of)
    return all(any(_is_same(other, item) for other in others) for item in items)


def _listed_items(variable: Any) -> list[Any] | None:
    items = getattr(content_of(variable), "items", None)
    if isinstance(items, dict):
        return list(items.items())
    return list(items) if isinstance(items, list) else None


def _attributes_of(variable: Any, effects: Any) -> dict[str, Any]:
    return dict(effects.store_attr_mutations.get(variable, {}))


def _are_same(before: Sequence[Any] | None, after: Sequence[Any] | None) -> bool:
    if before is None or after is None:
        return before is after
    return len(before) == len(after) and all(_is_same(b, a) for b, a in zip(before, after, strict=True))


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple):
        return bool(before[0] == after[0]) and _is_same(before[1], after[1])
    before, after = _realized(before), _realized(after)
    if before is after:
        return True
    if not (_is_constant(before) and _is_constant(after)):
        return False
    old, new = before.as_python_constant(), after.as_python_constant()
    return type(old) is type(new) and repr(old) == repr(new)


def _realized(variable: Any) -> Any:
    is_lazy = hasattr(variable, "is_realized")
    return variable.realize() if is_lazy and variable.is_realized() else variable


def _is_constant(variable: Any) -> bool:
    # forward has not looked at a lazy variable, and a look would add a guard
    if hasattr(variable, "is_realized") and not variable.is_realized():
        return False
    return bool(getattr(variable, "is_python_constant", lambda: False)())
