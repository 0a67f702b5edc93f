"""Refuses autograd functions whose gradients Dynamo would trace wrongly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

_GETATTR = ("var_getattr", "tp_getattro_impl")  # the second from torch 2.14 on


class UntraceableFunction(Exception):
    """Raised in a trace. The text names the feature of `torch.autograd.Function` that cannot be traced."""


@contextlib.contextmanager
def checked_autograd_functions() -> Iterator[None]:
    """Makes traces of this thread raise `UntraceableFunction` where Dynamo's gradients would be wrong.

    Dynamo ignores ``ctx.set_materialize_grads(False)``, which matters for functions with several outputs. Within a
    transform of torch.func it differentiates forward, and ignores the function's backward.
    """
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable

    getattr_name = next(name for name in _GETATTR if hasattr(AutogradFunctionContextVariable, name))
    thread, asked = threading.get_ident(), [False]
    apply, read = AutogradFunctionVariable.call_apply, getattr(AutogradFunctionContextVariable, getattr_name)

    def call_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return apply(self, *args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UntraceableFunction(
                f"{self.fn_cls.__name__}.apply runs within torch.func, where its backward cannot be traced"
            )
        asked.append(False)  # of this function, which may call others
        try:
            result = apply(self, *args, **kwargs)
        finally:
            has_asked = asked.pop()
        if has_asked and torch.is_grad_enabled() and len(getattr(result, "items", ())) > 1:
            raise UntraceableFunction(f"ctx.set_materialize_grads() of {self.fn_cls.__name__} cannot be traced")
        return result

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        if threading.get_ident() == thread and name == "set_materialize_grads":
            asked[-1] = True
        return read(self, tx, name)

    with (
        patch.object(AutogradFunctionVariable, "call_apply", call_apply),
        patch.object(AutogradFunctionContextVariable, getattr_name, get_attribute),
    ):
        yield
