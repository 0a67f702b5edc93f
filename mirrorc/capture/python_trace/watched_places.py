"""Compares the places where Python keeps what code reads with what was there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mirrorc.capture.python_trace.watchable_objects import copy_of, holds_same, is_equal, refill

ABSENT: Any = object()
"""What is in a place where there is nothing."""


@dataclass(frozen=True)
class Root:
    """By what code can reach an object.

    Attributes:
        key: the name of a global variable, or that of an attribute with a dot before it; empty if it needs none.
        words: what users call it.
    """

    key: str
    words: str


class WatchedPlaces:
    """Entries of mappings, containers, and the names in the dicts of modules and classes, with what was there."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, Any, Any, Root]] = []  # a mapping, a key, and what is there
        self._known: set[tuple[int, Any]] = set()
        self._kinds: dict[int, type] = {}  # the classes of mappings of their attributes
        self._names: list[tuple[Mapping[str, Any], frozenset[str], str]] = []
        self._containers: list[tuple[Any, Any, Root]] = []  # with a copy of what is in them

    def add(self, owner: Any, key: Any, value: Any, root: Root) -> None:
        """Watches an entry of a mapping, which holds a value."""
        if (id(owner), key) not in self._known:
            self._known.add((id(owner), key))
            self._places.append((owner, key, value, root))

    def add_names(self, attributes: Mapping[str, Any], words: str) -> None:
        """Watches which names there are in a dict of attributes."""
        self._names.append((attributes, frozenset(attributes), words))

    def add_class(self, kind: type, attributes: Mapping[str, Any]) -> None:
        """Watches which names there are in the dict of a class, whose entries are put back by assigning attributes."""
        self._kinds[id(attributes)] = kind
        self.add_names(attributes, kind.__qualname__)

    def add_container(self, container: Any, root: Root) -> None:
        """Watches what is in a list, dict or set."""
        self._containers.append((container, copy_of(container), root))

    def hold(self) -> bool:
        """Whether everything is as it was."""
        for owner, key, value, _ in self._places:
            found = owner.get(key, ABSENT)
            if found is not value and not is_equal(found, value):
                return False
        for attributes, names, _ in self._names:
            if attributes.keys() != names:
                return False
        for container, content, _ in self._containers:  # noqa: SIM110 - it takes half the time of a generator
            if not holds_same(container, content):
                return False
        return True

    def changed(self) -> list[str]:
        """The names of all that is not as it was."""
        found = [root.words for own, key, value, root in self._places if not is_equal(own.get(key, ABSENT), value)]
        found += [root.words for container, content, root in self._containers if not holds_same(container, content)]
        found += [f"the attributes of {words}" for own, names, words in self._names if own.keys() != names]
        return found

    def put_back(self) -> None:
        """Puts back what has changed, as far as Python lets it."""
        for container, content, _ in self._containers:
            refill(container, content)
        for owner, key, value, _ in self._places:
            if owner.get(key, ABSENT) is value:
                continue
            if isinstance(owner, MappingProxyType):
                if id(owner) in self._kinds:
                    setattr(self._kinds[id(owner)], key, value)
            else:
                owner[key] = value
