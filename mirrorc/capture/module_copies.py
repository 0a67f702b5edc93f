"""Copies of a user's modules that have Python objects of their own, and the tensors of one replica."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
_DEEPEST = 8
"""How many containers within one another are looked into; some hold themselves."""


class ModuleCopy:
    """A structural copy of a module and its submodules, to be run in one thread while others run their own.

    The copies have the classes of the originals, their attributes, and tables of parameters, buffers and submodules of their own.
    What is one object in the originals (shared modules, tied weights) is one object in the copy. Where attributes refer to a
    copied module, directly, by a bound method or a `functools.partial`, or in lists, tuples and dicts, those of the copy refer to
    its copy.

    Args:
        root: the original, which is not changed.

    Attributes:
        root: its copy. It can be run after `load`.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._copies: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in modules}
        self._pairs = [(vars(module), vars(self._copies[id(module)])) for module in modules]
        self._loaded: list[tuple[dict[str, Any], ...]] = []
        self._known: list[dict[str, tuple[Any, Any]]] = [{} for _ in modules]
        self.root = self._copies[id(root)]

    def load(self, tensors: Mapping[int, torch.Tensor], **of_root: Any) -> None:
        """Takes over the attributes that the originals have now.

        Args:
            tensors: what takes the places of parameters and buffers, by the ids of the originals'.
            **of_root: attributes that the root has instead of its original's.
        """
        self._loaded = []
        for (source, own), known in zip(self._pairs, self._known, strict=True):
            own.clear()
            own.update(source)
            for key, value in source.items():
                was = known.get(key)
                if was is None or was[0] is not value or was[1] is not value:
                    changed = value if key in _TABLES else self._of_copies(value)
                    known[key] = (value, changed)
                    own[key] = changed
            if own is vars(self.root):
                own.update(of_root)
            own["_parameters"] = _replaced(source["_parameters"], tensors.__getitem__)
            own["_buffers"] = _replaced(source["_buffers"], tensors.__getitem__)
            own["_modules"] = _replaced(source["_modules"], self._copies.__getitem__)
            self._loaded.append((dict(own), *(dict(own[table]) for table in _TABLES)))

    def unload(self) -> None:
        """Lets go of tensors."""
        self._loaded = []
        for _, own in self._pairs:
            own.clear()

    def assigned(self) -> str | None:
        """An attribute that was assigned, added or deleted since `load`, in whichever module; None if there is none."""
        for (_, own), loaded in zip(self._pairs, self._loaded, strict=True):
            tables = (own, *(own.get(table, {}) for table in _TABLES))
            for now, before in zip(tables, loaded, strict=True):
                for key, value in now.items():
                    if before.get(key, _ABSENT) is not value:
                        return key
                if len(now) != len(before):
                    return next(key for key in before if key not in now)
        return None

    def _of_copies(self, value: Any, depth: int = 0) -> Any:
        """An attribute's value with copies of modules in the place of the originals; the very value if it holds none."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return self._copies.get(id(value), value)
        if depth > _DEEPEST:
            return value
        of_copies = functools.partial(self._of_copies, depth=depth + 1)
        if kind is MethodType:
            owner = of_copies(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = map(of_copies, parts)
            is_same = all(a is b for a, b in zip(parts, (function, args, keywords), strict=True))
            return value if is_same else functools.partial(function, *args, **keywords)
        if kind in (list, tuple):
            items = [of_copies(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
        if kind in (dict, OrderedDict):
            members = {key: of_copies(item) for key, item in value.items()}
            return value if all(members[key] is item for key, item in value.items()) else kind(members)
        return value


_ABSENT = object()


def _replaced(table: Mapping[str, Any], by: Callable[[int], Any]) -> dict[str, Any]:
    return {key: None if value is None else by(id(value)) for key, value in table.items()}
