"""Observes allocations in compiled code and in operators."""

from __future__ import annotations

import ast
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


class _NoKernel:
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__  # the GPU's


def inductor_wrapper(compiled: Any) -> tuple[ast.FunctionDef, dict[str, Any]]:
    """The syntax tree of ``call(self, args)`` in a `compile_with_inductor` result, and its namespace.

    The namespace is for fake tensors: kernels do nothing; allocations and views are torch's.

    Raises:
        ValueError: the code has no such function, as with Inductor's C++ wrapper.
    """
    module = ast.parse(getattr(compiled, "source_code", None) or "")
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise ValueError(
            f"Inductor's code has {len(functions)} functions of the name 'call', not one: it was not understood"
        )
    namespace: dict[str, Any] = {}
    prelude: list[ast.stmt] = []
    for statement in module.body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if "async_compile" not in names:
            prelude.append(statement)
        elif isinstance(statement, ast.Assign):  # name = async_compile.cpp_pybinding(...)
            namespace.update({node.id: _NoKernel() for node in statement.targets if isinstance(node, ast.Name)})
    exec(compile(ast.Module(prelude, type_ignores=[]), "<Inductor's wrapper>", "exec"), namespace)
    for name in list(namespace):
        if name.startswith("empty_strided_"):
            namespace[name] = _empty_strided_on(name.removeprefix("empty_strided_").removesuffix("_pinned"))
    for name in ("assert_size_stride", "assert_alignment", "run_intermediate_hooks"):
        namespace[name] = _NoKernel()
    namespace["reinterpret_tensor"] = _reinterpret
    return functions[0], namespace


def _empty_strided_on(device: str) -> Callable[..., torch.Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def num_users(storage: torch.UntypedStorage) -> int:
    """The number of tensors and storage objects that use a storage, other than the argument itself."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for live tensors, real or fake, that share memory."""
    return int(tensor.untyped_storage()._cdata)


def peak_allocation(action: Callable[[], object], older: Sequence[torch.Tensor]) -> int:
    """The peak bytes of tensors allocated by operators in ``action``.

    Temporary memory within operators, and ``older`` tensors, do not count.
    """
    known = {storage_key(tensor) for tensor in older}
    holders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    peak = 0

    def drop(key: int) -> None:
        holders[key] -= 1
        if not holders[key]:
            del holders[key], sizes[key]

    def note(operator: Any, args: Any, result: Any) -> None:
        nonlocal peak
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in known:
                key = storage_key(tensor)
                holders[key], sizes[key] = holders.get(key, 0) + 1, tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, drop, key)
        peak = max(peak, sum(sizes.values()))

    with watched_operators(note):
        action()
    return peak


def watched_operators(note: Callable[[Any, tuple[Any, ...], Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Calls ``note(operator, args, result)`` after every operator of this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            note(func, args, result)
            return result

    return Watch()
