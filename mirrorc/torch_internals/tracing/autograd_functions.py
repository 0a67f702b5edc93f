"""Refuses autograd functions whose gradients Dynamo would trace wrongly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch


class UntraceableFunction(Exception):
    """Raised in a trace; the text says which feature of `torch.autograd.Function` cannot be traced."""


@contextlib.contextmanager
def checked_autograd_functions() -> Iterator[None]:
    """Makes traces of this thread raise `UntraceableFunction` where Dynamo's gradients are not those of plain PyTorch.

    Dynamo ignores ``ctx.set_materialize_grads(False)``. Within a transform of torch.func it takes gradients of what forward
    computes, not those of backward.
    """
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable

    thread = threading.get_ident()
    apply, read = AutogradFunctionVariable.call_apply, AutogradFunctionContextVariable.var_getattr

    def call_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and torch._C._functorch.peek_interpreter_stack() is not None:
            raise UntraceableFunction(
                f"{self.fn_cls.__name__}.apply runs within torch.func, where its backward cannot be traced"
            )
        return apply(self, *args, **kwargs)

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if threading.get_ident() == thread and name == "set_materialize_grads":
            raise UntraceableFunction("ctx.set_materialize_grads() cannot be traced")
        return read(self, tx, name)

    with (
        patch.object(AutogradFunctionVariable, "call_apply", call_apply),
        patch.object(AutogradFunctionContextVariable, "var_getattr", var_getattr),
    ):
        yield
