"""Dynamo support for ``x.requires_grad = True`` of a computed value, which changes no parameter's gradient."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def made_leaves() -> Iterator[None]:
    """Traces of this thread may set ``requires_grad`` to True on computed values.

    The graph stays the same, as backward goes from the loss to parameters alone.
    Refused are values older than the trace, their possible aliases, and values with a gradient function.
    """
    from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin

    kind: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # its own class since 2.13
    thread, call = threading.get_ident(), kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == thread and getattr(self, "fn", setattr) is setattr and len(args) == 3:
            owner, name, value = (arg.realize() if hasattr(arg, "realize") else arg for arg in args)
            is_computed = isinstance(owner, TensorVariable) and owner.source is None
            said = [arg.as_python_constant() for arg in (name, value) if arg.is_python_constant()]
            if is_computed and said == ["requires_grad", True] and _is_leaf_of_its_own(owner.as_proxy().node):
                owner.as_proxy().node.meta["example_value"].requires_grad_()
                owner.requires_grad = True
                return ConstantVariable.create(None)
        return call(self, tx, args, kwargs)

    kind.call_function = call_function
    try:
        yield
    finally:
        kind.call_function = call


def _is_leaf_of_its_own(node: Any) -> bool:
    """A leaf has no gradient function, is not its operand, and has no views yet."""
    value = node.meta["example_value"]

    def memory(other: Any) -> int:
        return other.untyped_storage()._cdata

    def values(nodes: Any) -> list[torch.Tensor]:
        found = [other.meta.get("example_value") for other in nodes]
        return [one for one in found if isinstance(one, torch.Tensor)]

    if value.grad_fn is not None:
        return False
    place = (value.shape, value.stride(), value.storage_offset())
    is_input = any(
        memory(one) == memory(value) and (one.shape, one.stride(), one.storage_offset()) == place
        for one in values(node.all_input_nodes)
    )
    return not is_input and all(memory(one) != memory(value) for one in values(node.users))
