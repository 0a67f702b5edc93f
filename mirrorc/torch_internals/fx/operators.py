"""What operators of torch declare and are made of; replaces them while a block runs, and calls one that has no public name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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


def is_operator(target: Any) -> bool:
    """Whether an object is an operator of torch with its overload, such as ``aten.add.Tensor``."""
    return isinstance(target, torch._ops.OpOverload)


def with_overload(target: Any) -> Any:
    """The default overload of an operator of torch that was named without one; anything else as it is."""
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def schema_of(target: Any) -> Any:
    """What an operator declares: its ``name`` with its namespace, ``overload_name``, ``arguments`` and ``returns``."""
    return target._schema


def writes_argument(target: Any) -> bool:
    """Whether an operator declares that it writes an argument in place."""
    return bool(target._schema.is_mutable)


def bare_name(target: Any) -> str:
    """The name of an operator without namespace and overload: ``add`` for ``aten.add_.Tensor``."""
    return str(target._schema.name.split("::")[-1].strip("_"))


def is_composite(target: Any) -> bool:
    """Whether an operator is composed of others, on every device: it has no kernel of its own."""
    return bool(target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def lazily_negative(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor whose numbers are negated when they are read, ``tensor.is_neg()``."""
    return torch._neg_view(tensor)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, in one call for all: on GPUs one kernel, and small tensors take half as long."""
    if targets:
        torch._foreach_copy_(targets, sources)


def scale_each(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor by a 0-d one, in place, in one call for all."""
    if targets:
        torch._foreach_mul_(targets, factor)


def subtract_each(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
    """Each tensor minus its number, in one call for all."""
    return list(torch._foreach_sub(list(tensors), list(numbers))) if tensors else []


def norms_of_each(
    tensors: list[torch.Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The norm of each tensor, of that type, computed in that dtype or in its own; in one call for all."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype)) if tensors else []
