"""Puts back what an evaluation changes in the user's objects: what a model and a loss hold, however deep."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from mirrorc.capture.call.containers import slots_of
from mirrorc.user.restore import KeptValue, can_keep_value, is_same, put_back_after

_CONTAINERS = (OrderedDict, dict, list, set, deque)  # a kind before those that it is made of
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "mirrorc"} - {"collections"}
"""Whose objects are not looked into, except for modules."""


@contextlib.contextmanager
def kept_objects(*roots: object) -> Iterator[None]:
    """Undoes what a block does to objects, also if the block fails, or if something cannot be put back.

    Put back are attributes in dicts and slots, collections, variables of closures, the values and shapes of tensors and of
    numpy's arrays, and the states of random generators: those that the roots hold, directly or through one another. Not looked
    into are globals, classes, iterators, Python generators, and objects of libraries other than modules and collections: queues
    of the standard library, say.

    Args:
        roots: models and losses.
    """
    with put_back_after(_KeptObjects(roots).actions):
        yield


class _KeptObjects:
    """What objects held at one time, each looked at once.

    Attributes:
        actions: what puts it back.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.actions: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # they live, so that no other object has their id
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen and not issubclass(type(value), str | int | float | type(None)):
                self._seen[id(value)] = value
                waiting.extend(self._kept(value))

    def _kept(self, value: Any) -> list[Any]:
        """Notes what an object holds; gives that."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if can_keep_value(value):
                self.actions.append(KeptValue(value).put_back)
            return []
        if issubclass(kind, np.ndarray):
            self.actions.append(functools.partial(_put_back_array, value, value.copy()))
            return list(value.flat) if value.dtype.hasobject else []
        self.actions += _states(value, kind)
        held: list[Any] = []
        container = next((container for container in _CONTAINERS if issubclass(kind, container)), None)
        if container is not None:
            held += self._kept_container(value, container)
        elif issubclass(kind, bytearray | array):
            self.actions.append(functools.partial(_put_back_numbers, value, value[:]))
        elif issubclass(kind, tuple | frozenset):
            held += tuple.__iter__(value) if issubclass(kind, tuple) else frozenset.__iter__(value)
        elif issubclass(kind, functools.partial):
            held += [value.func, value.args, value.keywords]
        elif kind is MethodType:
            held += [value.__self__, value.__func__]
        elif kind is FunctionType:
            held += [value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())]
        elif kind is CellType:
            held += self._kept_cell(value)
        if _is_looked_into(kind):
            held += [content for slot in slots_of(kind) for content in self._kept_slot(value, slot)]
            with contextlib.suppress(AttributeError):  # a proxy has none of its own, nor has what has only slots
                held.append(object.__getattribute__(value, "__dict__"))
        return held

    def _kept_container(self, value: Any, kind: Any) -> list[Any]:
        content: Any = dict(kind.items(value)) if issubclass(kind, dict) else list(kind.__iter__(value))
        self.actions.append(functools.partial(_refill, value, kind, content))
        return list(content.values() if isinstance(content, dict) else content)

    def _kept_slot(self, value: Any, slot: MemberDescriptorType) -> list[Any]:
        try:
            content = slot.__get__(value)
        except AttributeError:  # it is empty
            self.actions.append(functools.partial(_empty_slot, value, slot))
            return []
        self.actions.append(functools.partial(slot.__set__, value, content))
        return [content]

    def _kept_cell(self, cell: CellType) -> list[Any]:
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return []
        self.actions.append(functools.partial(setattr, cell, "cell_contents", content))
        return [content]


def _is_looked_into(kind: type) -> bool:
    if issubclass(kind, nn.Module | SimpleNamespace | FunctionType):
        return True
    return not issubclass(kind, type) and kind.__module__.partition(".")[0] not in _LIBRARIES


def _states(value: Any, kind: type) -> list[Callable[[], object]]:
    """What puts a random generator back to the state that it is in."""
    if issubclass(kind, torch.Generator):
        return [functools.partial(value.set_state, value.get_state())]
    if issubclass(kind, random.Random):
        return [functools.partial(value.setstate, value.getstate())]
    if issubclass(kind, np.random.RandomState):
        return [functools.partial(value.set_state, value.get_state())]
    if issubclass(kind, np.random.Generator):
        return [functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)]
    return []


def _refill(container: Any, kind: Any, content: Any) -> None:
    now = dict(kind.items(container)) if isinstance(content, dict) else list(kind.__iter__(container))
    if not is_same(now, content):
        kind.clear(container)
        (kind.extend if isinstance(container, list | deque) else kind.update)(container, content)


def _empty_slot(value: Any, slot: MemberDescriptorType) -> None:
    with contextlib.suppress(AttributeError):  # it is still empty
        slot.__delete__(value)


def _put_back_numbers(numbers: bytearray | array[Any], content: Any) -> None:
    if numbers != content:
        numbers[:] = content


def _put_back_array(values: Any, content: Any) -> None:
    if values.shape != content.shape:
        values.resize(content.shape, refcheck=False)
    if values.tobytes() != content.tobytes():
        values[...] = content
