"""Restores models, and the objects in them, after a block; compares values; the slots of classes."""

from __future__ import annotations

import contextlib
import functools
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
"""Types of module attributes whose contents are restored."""

_BASES = (OrderedDict, dict, list, set, deque)  # a subclass before its base


def restored(root: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Undoes a block's changes to a module and its submodules, even if the block fails.

    Restores attributes of modules and the contents of collections among them; memory, shape, ``requires_grad`` and
    ``grad`` of parameters and buffers; and values of buffers.
    """
    return put_back_after([*_attributes(root), *_variables(root)])


def _attributes(root: nn.Module) -> list[Callable[[], object]]:
    tables = [vars(module) for module in root.modules()]
    containers = [value for table in tables for value in table.values() if type(value) in CONTAINERS]
    return [functools.partial(refill, container, content_of(container)) for container in (*tables, *containers)]


def _variables(root: nn.Module) -> list[Callable[[], object]]:
    tensors = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers())}.values()
    values = [SavedValue(buffer).put_back for buffer in root.buffers() if not buffer.is_meta]
    return [*(_SavedTensor(tensor).put_back for tensor in tensors), *values]


@contextlib.contextmanager
def put_back_after(actions: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Runs all actions after a block, even if the block or some actions fail.

    The first failed action raises its error, or adds a note to the block's error.
    """
    try:
        yield
    except BaseException as error:
        failure = _first_failure(actions)
        if failure is not None:
            error.add_note(f"afterwards, something could not be put back: {type(failure).__name__}: {failure}")
        raise
    run_all(actions)


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Runs all actions, even if some fail. Raises the first error."""
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
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._original = tensor, tensor.data
        self._num_bytes = self._original.untyped_storage().nbytes()

    @property
    def has_moved(self) -> bool:
        is_resized = self._original.untyped_storage().nbytes() != self._num_bytes
        return is_resized or _place_of(self._tensor) != _place_of(self._original)

    def put_back(self) -> None:
        storage = self._original.untyped_storage()
        if storage.nbytes() != self._num_bytes:
            storage.resize_(self._num_bytes)
        if self.has_moved:
            self._tensor.data = self._original


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class SavedValue:
    """Restores value and memory, each only if it has changed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._value = tensor, _SavedMemory(tensor), tensor.detach().clone()

    @property
    def has_changed(self) -> bool:
        return self._memory.has_moved or not torch.equal(bytes_of(self._tensor), bytes_of(self._value))

    def put_back(self) -> None:
        self._memory.put_back()
        if self.has_changed:
            elements, value = self._tensor.detach(), self._value
            for dim, stride in enumerate(elements.stride()):
                if stride == 0:  # all entries are one element, which torch refuses to write twice
                    elements, value = elements.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
            elements.copy_(value)


def can_keep_value(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta or tensor.is_inference())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: nan equals itself, and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def content_of(container: Any) -> Any:
    kind = _base_of(container)
    if issubclass(kind, set):
        return set(kind.__iter__(container))
    return dict(kind.items(container)) if issubclass(kind, dict) else list(kind.__iter__(container))


def is_same(container: Any, content: Any) -> bool:
    if isinstance(container, dict):
        return is_same(list(container), list(content)) and is_same(list(container.values()), list(content.values()))
    if isinstance(container, set):
        return set(map(id, container)) == set(map(id, content))
    return len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))


def refill(container: Any, content: Any) -> None:
    """In a dict, writes only differences if the order is the same: other threads may read the dict."""
    kind = _base_of(container)
    if issubclass(kind, dict):
        for key in kind.keys(container) - content.keys():
            kind.__delitem__(container, key)
        for key, value in content.items():
            if key not in kind.keys(container) or kind.__getitem__(container, key) is not value:
                kind.__setitem__(container, key, value)
    if not is_same(content_of(container), content):
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


def slots_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    """Slots of a class and its bases. They access attributes without the class's methods."""
    with_slots = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    members = [member for names in with_slots for member in names.values()]
    return tuple(member for member in members if type(member) is types.MemberDescriptorType)


PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


def are_equal(first: Any, second: Any, depth: int = 0) -> bool:
    """Compares values by content; other objects, and tensors that require gradients, by identity."""
    if first is second:
        return True
    if type(first) is not type(second) or depth > 20:
        return False
    if isinstance(first, torch.Tensor):
        is_plain = all(can_keep_value(tensor) and not tensor.requires_grad for tensor in (first, second))
        types = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (first, second)]
        return is_plain and types[0] == types[1] and have_same_bits(first, second)
    if isinstance(first, np.ndarray):
        return (first.shape, first.dtype) == (second.shape, second.dtype) and first.tobytes() == second.tobytes()
    if isinstance(first, float):
        return first == second or (first != first and second != second)  # nan equals itself
    if isinstance(first, PLAIN):
        return bool(first == second)
    if isinstance(first, set | frozenset | bytearray | array):
        return first == second
    if is_collection(first) or isinstance(first, tuple):
        if isinstance(first, dict) and list(first) != list(second):
            return False
        items = [(*(each.values() if isinstance(each, dict) else each),) for each in (first, second)]
        return len(first) == len(second) and all(are_equal(a, b, depth + 1) for a, b in zip(*items, strict=True))
    return False


def requires_gradient(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if not (is_collection(value) or isinstance(value, tuple)) or depth > 20:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(requires_gradient(item, depth + 1) for item in items)


def have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(bytes_of(first), bytes_of(second))
