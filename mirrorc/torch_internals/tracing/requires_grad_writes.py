"""Lets Dynamo trace ``x.requires_grad = True`` on computed values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch


@contextlib.contextmanager
def made_leaves() -> Iterator[None]:
    """Makes traces of this thread accept ``requires_grad = True`` on computed values.

    The graph is the same, because backward leads only to parameters. Dynamo still refuses values from before the trace,
    their possible aliases, and values with a ``grad_fn``.
    """
    from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin

    kind: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # its own class since 2.13
    thread, call = threading.get_ident(), kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == thread and getattr(self, "fn", setattr) is setattr and len(args) == 3:
            owner, name, value = (arg.realize() if hasattr(arg, "realize") else arg for arg in args)
            is_computed = isinstance(owner, TensorVariable) and owner.source is None
            constants = [arg.as_python_constant() for arg in (name, value) if arg.is_python_constant()]
            if is_computed and constants == ["requires_grad", True] and _is_separate_leaf(owner.as_proxy().node):
                owner.as_proxy().node.meta["example_value"].requires_grad_()
                owner.requires_grad = True
                return ConstantVariable.create(None)
        return call(self, tx, args, kwargs)

    with patch.object(kind, "call_function", call_function):
        yield


def _is_separate_leaf(node: Any) -> bool:
    value = node.meta["example_value"]

    def memory(other: Any) -> int:
        return other.untyped_storage()._cdata

    def values(nodes: Any) -> list[torch.Tensor]:
        examples = [other.meta.get("example_value") for other in nodes]
        return [tensor for tensor in examples if isinstance(tensor, torch.Tensor)]

    if value.grad_fn is not None:
        return False
    place = (value.shape, value.stride(), value.storage_offset())
    is_input = any(
        memory(tensor) == memory(value) and (tensor.shape, tensor.stride(), tensor.storage_offset()) == place
        for tensor in values(node.all_input_nodes)
    )
    return not is_input and all(memory(tensor) != memory(value) for tensor in values(node.users))
