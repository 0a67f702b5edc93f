"""Detects changes to containers that a trace has built."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mirrorc.torch_internals.tracing.tracked_values import content_of


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
    return MadeContainer(output, variable, _items_of(variable), _attributes_of(variable, output.side_effects))


def changed_containers(made: Sequence[MadeContainer], effects: Any) -> list[ChangedContainer]:
    changed = []
    recorded = getattr(effects, "mutation_user_stacks", {})
    of_this_attempt = [container for container in made if container.output.side_effects is effects]
    for index, container in enumerate(of_this_attempt):
        variable, before = container.variable, container.items
        after = _without_defaults(variable, before, _items_of(variable))
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


def _items_of(variable: Any) -> list[Any] | None:
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
    if (
        hasattr(variable, "is_realized") and not variable.is_realized()
    ):  # forward has not looked at it, and a look would add a guard
        return False
    return bool(getattr(variable, "is_python_constant", lambda: False)())
