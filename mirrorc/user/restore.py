"""Restores models, and the objects that they hold, after a block."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from mirrorc.user.slots import slots_of

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
"""Types of module attributes whose contents are restored."""

_BASES = (OrderedDict, dict, list, set, deque)  # a subclass before its base
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "mirrorc"} - {"collections"}
"""Libraries whose objects are not searched, except for modules, functions and `SimpleNamespace`."""


@contextlib.contextmanager
def restored(root: nn.Module, *, deep: bool = False) -> Iterator[None]:
    """Undoes the changes of a block to a module and its submodules, also if the block fails.

    Restores attributes of modules and the contents of collections among them; memory, shape, ``requires_grad`` and
    ``grad`` of parameters and buffers; and values of buffers.

    Args:
        deep: restores all objects that the modules hold, also indirectly, except globals, classes, iterators, Python
            generators and most objects of libraries.
    """
    objects = _HeldObjects(root).actions if deep else _attributes(root)
    with put_back_after([*objects, *_variables(root)]):
        yield


def _attributes(root: nn.Module) -> list[Callable[[], object]]:
    tables = [vars(module) for module in root.modules()]
    containers = [value for table in tables for value in table.values() if type(value) in CONTAINERS]
    return [functools.partial(refill, container, content_of(container)) for container in (*tables, *containers)]


def _variables(root: nn.Module) -> list[Callable[[], object]]:
    tensors = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers())}.values()
    values = [_SavedValue(buffer).put_back for buffer in root.buffers() if not buffer.is_meta]
    return [*(_SavedTensor(tensor).put_back for tensor in tensors), *values]


@contextlib.contextmanager
def put_back_after(actions: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Runs all actions after a block, also if the block or some actions fail.

    The first failed action raises its error, or adds a note to the block's error.
    """
    try:
        yield
    except BaseException as error:
        failure = _first_failure(actions)
        if failure is not None:
            error.add_note(f"afterwards, something could not be put back: {type(failure).__name__}: {failure}")
        raise
    failure = _first_failure(actions)
    if failure is not None:
        raise failure


def _first_failure(actions: Iterable[Callable[[], object]]) -> Exception | None:
    first = None
    for action in actions:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the other actions run, then it is raised or noted
            first = first or error
    return first


class _SavedMemory:
    """Also undoes a resize."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._original = tensor, tensor.data
        self._num_bytes = self._original.untyped_storage().nbytes()

    def put_back(self) -> None:
        storage = self._original.untyped_storage()
        if storage.nbytes() != self._num_bytes:
            storage.resize_(self._num_bytes)
        if _place_of(self._tensor) != _place_of(self._original):
            self._tensor.data = self._original


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class _SavedValue:
    """Restores value and memory, each only if it has changed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._value = tensor, _SavedMemory(tensor), tensor.detach().clone()

    def put_back(self) -> None:
        self._memory.put_back()
        if not torch.equal(_bytes_of(self._tensor), _bytes_of(self._value)):
            elements, value = self._tensor.detach(), self._value
            for dim, stride in enumerate(elements.stride()):
                if stride == 0:  # all entries are one element, which torch refuses to write twice
                    elements, value = elements.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
            elements.copy_(value)


def can_keep_value(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta or tensor.is_inference())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes, nan equals itself, and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def content_of(container: Any) -> Any:
    kind = _base_of(container)
    return dict(kind.items(container)) if issubclass(kind, dict) else list(kind.__iter__(container))


def is_same(container: Any, content: Any) -> bool:
    """Compares a container's objects by identity."""
    if isinstance(container, dict):
        return is_same(list(container), list(content)) and is_same(list(container.values()), list(content.values()))
    return len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))


def refill(container: Any, content: Any) -> None:
    if not is_same(content_of(container), content):
        kind = _base_of(container)
        kind.clear(container)
        (kind.extend if issubclass(kind, list | deque) else kind.update)(container, content)


def is_collection(value: Any) -> bool:
    return issubclass(type(value), _BASES)


def _base_of(container: Any) -> Any:
    return next(base for base in _BASES if issubclass(type(container), base))


class _SavedTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._gradient = tensor, _SavedMemory(tensor), tensor.grad
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        self._memory.put_back()
        tensor = self._tensor
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.grad is not self._gradient:
            tensor.grad = self._gradient


class _HeldObjects:
    def __init__(self, root: object) -> None:
        self.actions: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # kept alive, so that no other object gets their id
        waiting = [root]
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen and not issubclass(type(value), str | int | float | type(None)):
                self._seen[id(value)] = value
                waiting.extend(self._held_by(value))

    def _held_by(self, value: Any) -> list[Any]:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if can_keep_value(value):
                self.actions.append(_SavedValue(value).put_back)
            return []
        if issubclass(kind, np.ndarray):
            self.actions.append(functools.partial(_put_back_array, value, value.copy()))
            return list(value.flat) if value.dtype.hasobject else []
        self.actions += _states(value, kind)
        held: list[Any] = []
        if issubclass(kind, _BASES):
            content = content_of(value)
            self.actions.append(functools.partial(refill, value, content))
            held += content.values() if isinstance(content, dict) else content
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
            held += self._held_by_cell(value)
        if _is_looked_into(kind):
            held += [content for slot in slots_of(kind) for content in self._held_by_slot(value, slot)]
            with contextlib.suppress(AttributeError):  # proxies and objects with slots alone have none
                held.append(object.__getattribute__(value, "__dict__"))
        return held

    def _held_by_slot(self, value: Any, slot: MemberDescriptorType) -> list[Any]:
        try:
            content = slot.__get__(value)
        except AttributeError:  # it is empty
            self.actions.append(functools.partial(_empty_slot, value, slot))
            return []
        self.actions.append(functools.partial(slot.__set__, value, content))
        return [content]

    def _held_by_cell(self, cell: CellType) -> list[Any]:
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
    if issubclass(kind, torch.Generator):
        return [functools.partial(value.set_state, value.get_state())]
    if issubclass(kind, random.Random):
        return [functools.partial(value.setstate, value.getstate())]
    if issubclass(kind, np.random.RandomState):
        return [functools.partial(value.set_state, value.get_state())]
    if issubclass(kind, np.random.Generator):
        return [functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)]
    return []


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
