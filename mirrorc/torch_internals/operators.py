"""Replaces operators of torch while a block runs, says how one is made, and calls one that has no public name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replaced_operators(replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Lets ``replace(operator, args, kwargs)`` give the result of operators that this thread runs, below autograd.

    Where it returns NotImplemented, the operator runs. Operators that ``replace`` itself runs are not replaced.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Replace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = replace(func, args, kwargs or {})
            return func(*args, **(kwargs or {})) if result is NotImplemented else result

    with Replace():
        yield


def is_composite(target: Any) -> bool:
    """Whether an operator is composed of others, on every device: it has no kernel of its own."""
    return bool(target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, in one call for all: on GPUs one kernel, and small tensors take half as long."""
    if targets:
        torch._foreach_copy_(targets, sources)
