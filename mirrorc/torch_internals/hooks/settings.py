"""Torch's structured trace, a thread's modes, and hooks, wrappers and fused kernels of optimizer steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import starmap
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize
from torch.optim import optimizer as of_all
from torch.utils.weak import WeakIdKeyDictionary


def is_structured_trace_on() -> bool:
    """True with TORCH_TRACE or a log handler of the user; handlers of newer pytest do not count."""
    from torch._logging._internal import LazyTraceHandler, trace_log

    asked_for = [handler for handler in trace_log.handlers if not type(handler).__module__.startswith("_pytest.")]
    # torch's lazy handler removes itself at the first record if no folder is set
    return any(not isinstance(handler, LazyTraceHandler) or handler.root_dir is not None for handler in asked_for)


def trace_artifact(name: str, text: str) -> None:
    from torch._logging._internal import trace_structured

    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)


def adagrad_is_fused_on_gpus() -> bool:
    """Torch 2.11 refuses ``fused=True`` for parameters on GPUs; 2.13 accepts it."""
    return "cuda_unsupported=True" not in inspect.getsource(torch.optim.Adagrad)


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells LR schedulers about a step that bypassed ``optimizer.step``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class UncountedHook:
    """A step hook without effect on the step, which `has_step_hooks` ignores."""

    def __init__(self, function: Callable[[torch.optim.Optimizer], None]) -> None:
        self._function = function

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._function(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if this optimizer, or all optimizers, have step hooks other than `UncountedHook`."""
    for hooks in (of_all._global_optimizer_pre_hooks, of_all._global_optimizer_post_hooks):
        if _counts_any(hooks):
            return True
    if not calls_step_hooks(optimizer):
        return False
    return _counts_any(optimizer._optimizer_step_pre_hooks) or _counts_any(optimizer._optimizer_step_post_hooks)


def _counts_any(hooks: Mapping[int, object]) -> bool:
    for hook in hooks.values():  # noqa: SIM110 - any() takes three times as long, in every step
        if type(hook) is not UncountedHook:
            return True
    return False


def calls_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """False for an optimizer that does not call ``Optimizer.__init__``."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "_optimizer_step_post_hooks")


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """The step without torch's wrappers, which take longer than the update of a small bucket.

    Callers must disable gradients and check that there are no hooks.
    """
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(kind.step)
    return step


_WITH_FUSED_KERNELS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def takes_divisor(kind: type[torch.optim.Optimizer]) -> bool:
    return kind in _WITH_FUSED_KERNELS


@contextmanager
def dividing_gradients(optimizer: torch.optim.Optimizer, divisor: float) -> Iterator[None]:
    """In this context, a fused step divides the gradients in place. Other steps refuse ``grad_scale``."""
    optimizer.grad_scale = torch.tensor(divisor, dtype=torch.float32)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def has_torchs_step(optimizer: torch.optim.Optimizer) -> bool:
    """Ignores patches of ``optimizer.step`` by LR schedulers and ``torch.compile``."""
    of_class = type(optimizer).step
    step = optimizer.__dict__.get("step", of_class)
    if step is not of_class:
        step = getattr(step, "_torchdynamo_orig_callable", step)
        if getattr(step, "_wrapped_by_lr_sched", False):
            step = getattr(step, "__wrapped__", step)
        if isinstance(step, MethodType) and step.__self__ is optimizer:
            step = step.__func__
    return step is of_class and _is_from_torch(of_class)


@functools.lru_cache(maxsize=256)
def _is_from_torch(function: Any) -> bool:
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(torch.__path__[0]):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The tables themselves, not copies."""
    return [getattr(module, name) for name in _HOOK_TABLES]


def global_hook_tables() -> list[Mapping[Any, Any]]:
    from torch.nn.modules import module

    return [getattr(module, f"_global{name}") for name in _HOOK_TABLES]


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Includes hooks on the AccumulateGrad node of a leaf."""
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return True
    is_in_graph = tensor.requires_grad and tensor.is_leaf and tensor._use_count() > 1  # type: ignore[attr-defined]
    return is_in_graph and _has_node_hooks(tensor)


def _has_node_hooks(leaf: torch.Tensor) -> bool:
    """Finds the tables of a node's hooks through handles of hooks. The tables live as long as the node."""
    tables = _tables_of_nodes.get(leaf, ())
    if not tables or any(table() is None for table in tables):
        with torch.inference_mode(False):
            node = get_gradient_edge(leaf).node
        handles = [register(print) for register in (node.register_hook, node.register_prehook)]
        tables = _tables_of_nodes[leaf] = [handle.hooks_dict_ref for handle in handles]
        for handle in handles:
            handle.remove()
    return any(table() for table in tables)


_tables_of_nodes = WeakIdKeyDictionary()


_ROUNDED = tuple((backend, of) for backend in ("cuda", "mkldnn") for of in ("matmul", "conv", "rnn"))
"""Operators whose float32 products torch may round. These keys also reflect torch's older settings."""


def torch_modes() -> tuple[Any, ...]:
    """Settings that affect a captured graph or its compiled code."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    return (
        autocast,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(starmap(torch._C._get_fp32_precision_getter, _ROUNDED)),
        _function_modes() if torch._C._len_torch_function_stack() else (),
    )


def _function_modes() -> tuple[Any, ...]:
    """Torch stores the default device as a function mode, too."""
    modes = torch.overrides._get_current_function_mode_stack()
    return tuple((type(mode), str(getattr(mode, "device", ""))) for mode in modes)


def is_plain_thread() -> bool:
    return (
        not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
    )


no_torch_function = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` for tensor subclasses: operators then return plain tensors."""


def as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """An object of a subclass with the tensor's memory. It is not a view, so it can be modified in place."""
    return torch.Tensor._make_subclass(kind, tensor)


def dispatch_modes() -> list[str]:
    if not torch._C._len_torch_dispatch_stack():
        return []
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def without_dispatch_modes() -> AbstractContextManager[Any]:
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def has_hooks_on_saved_tensors() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def backward_keeps_graph() -> bool:
    """Within a backward: True with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_backward() -> int:
    """The number of the backward that runs in this thread; -1 without one."""
    return int(torch._C._current_graph_task_id())


def runs_transform(*tensors: torch.Tensor | None) -> bool:
    """True within a transform of torch.func, within forward-mode differentiation, and for a batch of gradients."""
    from torch.autograd import forward_ad

    is_within = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return is_within or any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill the memory without gaps or overlaps, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def parametrization_cache() -> dict[tuple[int, str], torch.Tensor | None]:
    """The current cache; it is replaced at the end of ``cached()``."""
    cache: dict[tuple[int, str], torch.Tensor | None] = parametrize._cache
    return cache


def caches_parametrizations() -> bool:
    return bool(parametrize._cache_enabled)
