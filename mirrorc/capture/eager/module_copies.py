"""Copies of a user's modules for one replica."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.dynamo.traced_substitutes import SYNCHRONIZED, has_substitute
from mirrorc.capture.model.function_module import with_copies
from mirrorc.capture.model.transient_attributes import (
    Attribute,
    ReadBeforeAssignedError,
    unread_elsewhere,
    unwatched_class,
    watching_class,
)
from mirrorc.torch_internals import ScriptCopy, is_script_module, renew_recurrent_weights

_TABLES = ("_parameters", "_buffers", "_modules")
_BUFFERS = 1 + _TABLES.index("_buffers")  # the place of the table after the attributes
_DEEPEST = 8
"""The search depth in nested containers, which may contain themselves."""


class ModuleCopy:
    """A copy of a module and its submodules, so that threads can run the module at the same time.

    The copies share objects with the originals, except tables of parameters, buffers and submodules. References to
    copied modules are replaced in attributes, bound methods, functions' closures and globals, and plain containers.
    """

    def __init__(self, root: nn.Module) -> None:
        modules, scripts = _outside_of_scripts(root)
        self._copies: dict[int, nn.Module] = {id(m): object.__new__(unwatched_class(type(m))) for m in modules}
        self._scripts = [ScriptCopy(module) for module in scripts]
        of_scripts = {id(source): copy for script in self._scripts for source, copy in script.pairs}
        self._copies_of_all = self._copies | of_scripts
        self.originals = modules
        self._pairs = [(vars(module), vars(self._copies[id(module)])) for module in modules]
        self._loaded: list[tuple[dict[str, Any], ...]] = []
        self._transient: Set[Attribute] = frozenset()
        self._known: list[dict[str, tuple[Any, Any]]] = [{} for _ in modules]
        self.root = self._copies[id(root)]

    def load(
        self, tensors: Mapping[int, torch.Tensor], transient: Set[Attribute] = frozenset(), **of_root: Any
    ) -> None:
        """Loads the originals' attributes, except ``transient`` ones, which the copies assign before each read.

        Args:
            tensors: parameters and buffers of the copies, by the ids of the originals' tensors.
        """
        self._loaded = []
        if transient != self._transient:
            self._watch(transient)
        each = zip(self.originals, self._copies.values(), self._pairs, self._known, strict=True)
        for original, module, (source, members), known in each:
            members.clear()
            members.update(source)
            for key, value in source.items():
                was = known.get(key)
                if was is None or was[0] is not value or was[1] is not value:
                    changed = value if key in _TABLES else self._of_copies(value)
                    known[key] = (value, changed)
                    members[key] = changed
            if members is vars(self.root):
                members.update(of_root)
            members["_parameters"] = _replaced(source["_parameters"], tensors.__getitem__)
            members["_buffers"] = _replaced(source["_buffers"], tensors.__getitem__)
            members["_modules"] = _replaced(source["_modules"], self._copies_of_all.__getitem__)
            if has_substitute(original):
                members["forward"] = MethodType(SYNCHRONIZED[nn.SyncBatchNorm.forward], module)
            if isinstance(module, nn.RNNBase):
                renew_recurrent_weights(module)
            self._loaded.append((dict(members), *(dict(members[table]) for table in _TABLES)))
        for script in self._scripts:
            script.load(lambda tensor: tensors[id(tensor)])
        for place, name in transient:
            for attributes in (self._pairs[place][1], self._loaded[place][0]):
                attributes.pop(name, None)

    def alone(self, carried: Set[Attribute] = frozenset()) -> contextlib.AbstractContextManager[Any]:
        """Makes reads of originals' attributes fail if runs assign them: runs assign only the copies' attributes."""
        names: dict[nn.Module, set[str]] = {}
        for place, name in self._transient | carried:
            names.setdefault(self.originals[place], set()).add(name)
        return unread_elsewhere(names)

    def run(self, *args: Any) -> Any:
        """Runs without TorchScript's profile-guided optimization."""
        with torch.jit.optimized_execution(False) if self._scripts else contextlib.nullcontext():
            try:
                return self.root(*args)
            except ReadBeforeAssignedError as error:
                for place, copy in enumerate(self._copies.values()):
                    if copy is error.module:
                        error.attribute, error.module = (place, error.name), self.originals[place]
                raise

    def hand_over(self, attributes: Set[Attribute]) -> None:
        """Copies the values that a run has assigned to these attributes to the originals."""
        for place, name in attributes:
            (source, now), loaded = self._pairs[place], self._loaded[place][0]
            if now.get(name, _ABSENT) is loaded.get(name, _ABSENT):
                continue
            if name in now:
                source[name] = now[name]
            else:
                source.pop(name, None)

    def unload(self) -> None:
        self._loaded = []
        for script in self._scripts:
            script.unload()
        for _, attributes in self._pairs:
            attributes.clear()

    def assigned(self) -> list[Attribute]:
        """The attributes assigned, added or deleted since `load`, other than transient ones."""
        assigned = []
        for place, ((_, attributes), loaded) in enumerate(zip(self._pairs, self._loaded, strict=True)):
            changed = [key for key, value in attributes.items() if loaded[0].get(key, _ABSENT) is not value]
            assigned += [(place, key) for key in (*changed, *(key for key in loaded[0] if key not in attributes))]
        return [attribute for attribute in assigned if attribute not in self._transient]

    def take_assigned_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Buffers assigned since `load`, before and after. The former tensors are restored.

        Buffers of several modules are left out, because an assignment changes one module only.
        """
        assigned = []
        held = Counter(id(buffer) for loaded in self._loaded for buffer in loaded[_BUFFERS].values())
        for (_, attributes), loaded in zip(self._pairs, self._loaded, strict=True):
            now, before = attributes.get("_buffers", {}), loaded[_BUFFERS]
            for key, buffer in before.items():
                value = now.get(key)
                are_tensors = isinstance(value, torch.Tensor) and isinstance(buffer, torch.Tensor)
                if value is not buffer and are_tensors and held[id(buffer)] == 1:
                    assigned.append((buffer, value))
                    now[key] = buffer
        return assigned

    def replaced(self) -> str | None:
        """The name of a parameter, buffer, submodule or TorchScript attribute that was replaced since `load`."""
        for (_, attributes), loaded in zip(self._pairs, self._loaded, strict=True):
            for table, before in zip(_TABLES, loaded[1:], strict=True):
                now = attributes.get(table, {})
                for key in (*now, *before):
                    if now.get(key, _ABSENT) is not before.get(key, _ABSENT):
                        return key
        return next(filter(None, (script.changed() for script in self._scripts)), None)

    def _watch(self, transient: Set[Attribute]) -> None:
        self._transient = frozenset(transient)
        for place, module in enumerate(self._copies.values()):
            names = frozenset(name for index, name in transient if index == place)
            if type(module) is not (kind := watching_class(type(module), names)):
                object.__setattr__(module, "__class__", kind)

    def _of_copies(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if isinstance(value, nn.Module):
            return self._copies_of_all.get(id(value), value)
        if depth > _DEEPEST:
            return value
        of_copies = functools.partial(self._of_copies, depth=depth + 1)
        if kind is MethodType:
            owner = of_copies(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is FunctionType:
            return with_copies(value, of_copies)
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


def _outside_of_scripts(root: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    scripts = list(filter(is_script_module, root.modules()))
    within = {id(part) for script in scripts for part in script.modules() if part is not script}
    others = [module for module in root.modules() if not is_script_module(module) and id(module) not in within]
    return others, [script for script in scripts if id(script) not in within]


def _replaced(table: Mapping[str, Any], by: Callable[[int], Any]) -> dict[str, Any]:
    return {key: None if value is None else by(id(value)) for key, value in table.items()}
