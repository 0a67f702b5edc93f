"""Attributes that forward assigns before each read, so their values need not outlive a run."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from types import new_class
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mirrorc.capture.diagnostics.python_effects import assigned_attribute, users_place
from mirrorc.errors import CaptureError, ExecutionError
from mirrorc.messages.problem import problem

Attribute = tuple[int, str]
"""An attribute other than a parameter, buffer or submodule: its module's index, and its name.

Indices count the modules of ``root.modules()`` outside of TorchScript.
"""

_ABSENT = object()
_WATCHED = "_mirrorc_transient_attributes"


class CarriedAttributes:
    """Attributes that forward reads before it assigns them: each step continues with the value of the last one."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self.num = 0

    def add(self, module: nn.Module, name: str) -> None:
        self._names.setdefault(module, set()).add(name)
        self.num += 1

    def of(self, module: nn.Module) -> Set[str]:
        return self._names.get(module, frozenset())

    def among(self, modules: Sequence[nn.Module]) -> frozenset[Attribute]:
        if not self._names:
            return frozenset()
        return frozenset((place, name) for place, module in enumerate(modules) for name in self.of(module))


CARRIED = CarriedAttributes()


class AssignedAttributeError(ExecutionError):
    """Raised if forward assigns attributes; ``attributes`` is empty if a parameter, buffer or submodule is assigned."""

    def __init__(self, text: str, name: str = "", attributes: Sequence[Attribute] = ()) -> None:
        super().__init__(text)
        self.name, self.attributes = name, attributes

    @classmethod
    def of(cls, name: str, attributes: Sequence[Attribute] = ()) -> AssignedAttributeError:
        text = assigned_attribute("a module", f"its attribute {name!r}", "it would not last in a step")
        return cls(text, name, attributes)


class ReadBeforeAssignedError(ExecutionError):
    attribute: Attribute | None = None

    def __init__(self, text: str, name: str = "", module: nn.Module | None = None) -> None:
        super().__init__(text)
        self.name, self.module = name, module

    @classmethod
    def of(cls, name: str, module: nn.Module | None = None) -> ReadBeforeAssignedError:
        why = (
            "it reads the attribute before, so that what one call leaves counts in the next; in a step it does not last"
        )
        text = assigned_attribute("a module", f"its attribute {name!r}", why)
        return cls(text, name, module)


class _TransientAttribute:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:  # read from the class
            raise AttributeError(self._name)
        if self._name not in vars(module):
            raise ReadBeforeAssignedError.of(self._name, module)
        return vars(module)[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if vars(module).pop(self._name, _ABSENT) is _ABSENT:
            raise ReadBeforeAssignedError.of(self._name, module)


class _LeftAttribute(_TransientAttribute):
    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is not None and self._name not in vars(module):
            raise _read_elsewhere(self._name)
        return super().__get__(module, owner)


def _read_elsewhere(name: str) -> CaptureError:
    return problem(
        CaptureError,
        f"MC2301: the attribute {name!r}, which forward sets, is read through a global variable or a closure",
        "each replica has modules of its own, so that what forward leaves there is not found",
        ("return it with the output", "make the loss a module that holds the model as a submodule"),
        at=users_place(traceback.extract_stack()),
    )


@contextlib.contextmanager
def unread_elsewhere(modules: Mapping[nn.Module, Set[str]]) -> Iterator[None]:
    """Makes reads of these attributes of original modules raise a `CaptureError`."""
    kinds = {module: type(module) for module in modules}
    removed = [
        (vars(module), name, vars(module)[name])
        for module, names in modules.items()
        for name in names & vars(module).keys()
    ]
    try:
        for attributes, name, _ in removed:
            del attributes[name]
        for module, names in modules.items():
            object.__setattr__(module, "__class__", watching_class(kinds[module], names, _LeftAttribute))
        yield
    finally:
        for module, kind in kinds.items():
            object.__setattr__(module, "__class__", kind)
        for attributes, name, value in removed:
            attributes[name] = value


def watching_class(kind: type, names: Set[str], attribute: type[_TransientAttribute] = _TransientAttribute) -> type:
    """A subclass of ``kind`` in which the attributes ``names`` must be assigned before they are read."""
    watched: Set[str] = getattr(kind, _WATCHED, frozenset())
    if names == watched:
        return kind
    if watched:
        return watching_class(kind.__mro__[1], names, attribute)
    members: dict[str, Any] = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
    members |= {_WATCHED: names, **{name: attribute(name) for name in names}}
    return new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(members))


def unwatched_class(kind: type) -> type:
    return kind.__mro__[1] if _WATCHED in vars(kind) else kind
