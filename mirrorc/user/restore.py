"""Puts a model back as it was, whatever tracing has done to it."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
"""The kinds of collections whose contents are put back, where they are attributes of modules."""


@contextlib.contextmanager
def kept_as_it_is(root: nn.Module) -> Iterator[None]:
    """Undoes what a block does to a module and its submodules, also if the block fails.

    A tracer puts its own tensors in the place of parameters and runs the user's code. Each module gets its own attributes back,
    its tables of parameters, buffers, submodules and hooks are those of before, and so are the lists, deques, dicts and
    sets that are its attributes. Each tensor has its own memory, shape, ``requires_grad`` and ``grad`` again, each buffer its
    values.

    Args:
        root: the module; nothing but what its modules hold is put back.
    """
    modules = [_KeptModule(module) for module in root.modules()]
    tensors = [_KeptTensor(t) for t in {id(t): t for t in (*root.parameters(), *root.buffers())}.values()]
    values = [KeptValue(buffer) for buffer in root.buffers() if not buffer.is_meta]
    actions = [kept.put_back for kept in modules] + [kept.put_back for kept in tensors]
    with put_back_after(actions + [kept.put_back for kept in values]):
        yield


@contextlib.contextmanager
def put_back_after(actions: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Runs all actions after a block, also if the block or some of the actions fail.

    An error of the block stays the error that is raised, with a note of the first action that failed; without one, the error of
    that action is raised.

    Args:
        actions: what puts things back, in this order.
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
    """Runs all actions; gives the error of the first that failed."""
    first = None
    for action in actions:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the other actions run, then it is raised or told
            first = first or error
    return first


class _KeptMemory:
    """The memory that a tensor's elements are in, with shape, strides and dtype; it has its size again after a resize."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._own = tensor, tensor.data
        self._num_bytes = self._own.untyped_storage().nbytes()

    def put_back(self) -> None:
        storage = self._own.untyped_storage()
        if storage.nbytes() != self._num_bytes:
            storage.resize_(self._num_bytes)
        if _place_of(self._tensor) != _place_of(self._own):
            self._tensor.data = self._own


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class KeptValue:
    """The value of a tensor and its place in memory, each of which is put back only if it has changed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._value = tensor, _KeptMemory(tensor), tensor.detach().clone()

    def put_back(self) -> None:
        self._memory.put_back()
        if not torch.equal(_bytes_of(self._tensor), _bytes_of(self._value)):
            own, value = self._tensor.detach(), self._value
            for dim, stride in enumerate(own.stride()):
                if stride == 0:  # its entries are one and the same, which torch does not write twice
                    own, value = own.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
            own.copy_(value)


def can_keep_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of numbers in memory, which can be copied, compared and written."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta or tensor.is_inference())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, so that not a number equals itself, and 0.0 does not equal -0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _KeptModule:
    """What a module holds: its attributes, and what is in those that are containers."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = module.__dict__
        self._contents = [(value, content_of(value)) for value in module.__dict__.values() if type(value) in CONTAINERS]
        self._own = dict(module.__dict__)

    def put_back(self) -> None:
        if not is_same(self._attributes, self._own):
            _refill(self._attributes, self._own)
        for container, content in self._contents:
            if not is_same(container, content):
                _refill(container, content)


def content_of(container: Any) -> Any:
    """The objects that a container holds, for `is_same`."""
    return dict(container) if isinstance(container, dict) else list(container)


def is_same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that it held; they are not compared, which tensors would do elementwise."""
    if isinstance(container, dict):
        return is_same(list(container), list(content)) and is_same(list(container.values()), list(content.values()))
    return len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    extend = container.extend if isinstance(container, (list, deque)) else container.update
    extend(content)


class _KeptTensor:
    """A parameter's or a buffer's memory, and what autograd knows of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._gradient = tensor, _KeptMemory(tensor), tensor.grad
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        self._memory.put_back()
        tensor = self._tensor
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.grad is not self._gradient:
            tensor.grad = self._gradient
