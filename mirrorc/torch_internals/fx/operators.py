"""Schemas of torch operators, their temporary replacement, private calls, and asserts that traces record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def replaced_operators(
    replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """Replaces results of this thread's operators, below autograd, by ``replace(operator, args, kwargs)``.

    NotImplemented stands for the operator's own result. Operators within ``replace`` are not replaced.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Replace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = replace(func, args, kwargs or {})
            return func(*args, **(kwargs or {})) if result is NotImplemented else result

    return Replace()


def is_operator(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def with_overload(target: Any) -> Any:
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def schema_of(target: Any) -> Any:
    return target._schema


def writes_argument(target: Any) -> bool:
    return bool(target._schema.is_mutable)


def bare_name(target: Any) -> str:
    """The name without namespace, overload and in-place suffix: ``add`` for ``aten.add_.Tensor``."""
    return str(target._schema.name.split("::")[-1].strip("_"))


def is_composite(target: Any) -> bool:
    """True for an operator without kernels, composed of other operators."""
    return bool(target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def lazily_negative(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Runs one kernel on GPUs, in half the time for small tensors."""
    if targets:
        torch._foreach_copy_(targets, sources)


def scale_each(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    if targets:
        torch._foreach_mul_(targets, factor)


def subtract_each(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
    return list(torch._foreach_sub(list(tensors), list(numbers))) if tensors else []


def norms_of_each(
    tensors: list[torch.Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype)) if tensors else []


@contextlib.contextmanager
def recorded_by_autograd() -> Iterator[None]:
    """Enables autograd within a kernel, although the dispatcher has disabled it."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


NOT_ALL_TRUE = "not all elements are true of what torch._check_tensor_all is given"


def assert_true(condition: torch.Tensor, text: str) -> None:
    """Raises RuntimeError unless a one-element tensor is true. A trace records the assert."""
    torch._assert_async(condition, text)


def _check_all(condition: torch.Tensor, message: Any = None) -> None:
    assert_true(condition.all(), NOT_ALL_TRUE)


def _check_all_with(error_type: type, condition: torch.Tensor, message: Any = None) -> None:
    assert_true(condition.all(), NOT_ALL_TRUE)


CHECKS_OF_TENSORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch._check_tensor_all: _check_all,
    torch._check_tensor_all_with: _check_all_with,
}
"""Substitutes in a trace for torch's checks of tensor values, because a trace cannot format their messages."""
