"""Puts a model back as it was, whatever tracing has done to it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set)


@contextlib.contextmanager
def kept_as_it_is(root: nn.Module) -> Iterator[None]:
    """Undoes what a block does to a module and its submodules, also if the block fails.

    A tracer puts its own tensors in the place of parameters and runs the user's code. Each module gets its own attributes back,
    its tables of parameters, buffers, submodules and hooks are those of before, and so are the lists, dicts and sets that
    are its attributes. Each tensor has its own memory, ``requires_grad`` and ``grad`` again, each buffer its values.

    Args:
        root: the module; nothing but what its modules hold is put back.
    """
    modules = [_KeptModule(module) for module in root.modules()]
    tensors = [_KeptTensor(t) for t in {id(t): t for t in (*root.parameters(), *root.buffers())}.values()]
    values = [KeptValue(buffer) for buffer in root.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for module in modules:
            module.put_back()
        for tensor in tensors:
            tensor.put_back()
        for value in values:
            value.put_back()


class KeptValue:
    """The value of a tensor, which is written back only if it has changed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._value = tensor, tensor.detach().clone()

    def put_back(self) -> None:
        if not torch.equal(_bytes_of(self._tensor), _bytes_of(self._value)):
            self._tensor.detach().copy_(self._value)


def can_keep_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of numbers in memory, which can be copied, compared and written."""
    is_plain = (
        tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()
    )
    return is_plain and not tensor.is_meta and not tensor.is_inference()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, so that not a number equals itself, and 0.0 does not equal -0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _KeptModule:
    """What a module holds: its attributes, and what is in those that are containers."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = module.__dict__
        self._contents = [(value, _copy_of(value)) for value in module.__dict__.values() if type(value) in _CONTAINERS]
        self._own = dict(module.__dict__)

    def put_back(self) -> None:
        if not is_same(self._attributes, self._own):
            _refill(self._attributes, self._own)
        for container, content in self._contents:
            if not is_same(container, content):
                _refill(container, content)


def _copy_of(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def is_same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that it held; they are not compared, which tensors would do elementwise."""
    if isinstance(container, dict):
        return is_same(list(container), list(content)) and is_same(list(container.values()), list(content.values()))
    return len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    extend = container.extend if isinstance(container, list) else container.update
    extend(content)


class _KeptTensor:
    """A parameter's or a buffer's memory, and what autograd knows of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._data, self._gradient = tensor, tensor.data, tensor.grad
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        tensor = self._tensor
        if tensor.data_ptr() != self._data.data_ptr():
            tensor.data = self._data
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.grad is not self._gradient:
            tensor.grad = self._gradient
