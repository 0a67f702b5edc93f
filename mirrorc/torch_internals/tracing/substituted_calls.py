"""Changes of Dynamo in traces of this thread: substitutes for functions, and calls that it refuses or traces wrongly."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch


@contextlib.contextmanager
def traced_instead(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Makes traces of this thread enter substitutes for torch's functions."""
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread = threading.get_ident()
    by_id: dict[int, Any] = {id(function): instead for function, instead in functions.items()}

    def substituted(call: Callable[..., Any], attribute: str) -> Callable[..., Any]:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            instead = by_id.get(id(getattr(self, attribute)))
            if instead is None or threading.get_ident() != thread:
                return call(self, tx, args, kwargs)
            bound = self.self_args() if attribute == "fn" else []  # a method's object
            return UserFunctionVariable(instead).call_function(tx, [*bound, *args], kwargs)

        return call_function

    kinds: dict[Any, str] = {  # the attribute with the function; versions of torch differ in the kinds
        TorchInGraphFunctionVariable: "value",
        SkipFunctionVariable: "value",
        UserFunctionVariable: "fn",
    }
    patches = [
        patch.object(kind, "call_function", substituted(kind.call_function, name)) for kind, name in kinds.items()
    ]
    with contextlib.ExitStack() as stack:
        for replacement in patches:
            stack.enter_context(replacement)
        yield


def called_while_traced(functions: Collection[Callable[..., Any]]) -> contextlib.AbstractContextManager[Any]:
    """Makes traces of this thread call these Python functions with constants, without tracing them.

    A function must return a constant, or a function that is traced when it is called.
    """
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable

    thread, call = threading.get_ident(), UserFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn not in functions or threading.get_ident() != thread:
            return call(self, tx, args, kwargs)
        constants = {key: value.as_python_constant() for key, value in kwargs.items()}
        result = self.fn(*(arg.as_python_constant() for arg in args), **constants)
        return UserFunctionVariable(result) if isinstance(result, FunctionType) else ConstantVariable.create(result)

    return patch.object(UserFunctionVariable, "call_function", call_function)


@contextlib.contextmanager
def noted_calls(function: Callable[..., Any]) -> Iterator[list[int]]:
    """Collects the lines at which traces of this thread call a torch function."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread, lines, call = threading.get_ident(), list[int](), TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is function and threading.get_ident() == thread:
            lines.append(tx.lineno)
        return call(self, tx, args, kwargs)

    with patch.object(TorchInGraphFunctionVariable, "call_function", call_function):
        yield lines


def asked_for_class(kind: type) -> contextlib.AbstractContextManager[Any]:
    """Makes traces of this thread treat objects of ``kind`` as Python does.

    isinstance() uses ``__class__``, but Dynamo ignores it if given a tuple of classes. Attributes are looked up in
    ``kind``, but Dynamo looks them up in ``__class__``.
    """
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    thread, python_type = threading.get_ident(), UserDefinedObjectVariable.python_type
    looked_up: Any = getattr(UserDefinedObjectVariable, "lookup_class_mro_attr", None)  # older torch has none

    def class_of(self: Any) -> type:
        if self.value_type is not kind or threading.get_ident() != thread:
            return python_type(self)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code is class_of.__code__:  # the patch of another class
            frame = frame.f_back
        return self.value.__class__ if frame.f_code.co_name == "call_isinstance" else python_type(self)

    def look_up(self: Any, name: str) -> Any:
        if self.value_type is kind and threading.get_ident() == thread:
            for base in kind.__mro__:
                if name in vars(base):
                    return vars(base)[name]
        return looked_up(self, name)

    methods: dict[str, Any] = {"python_type": class_of}
    if looked_up is not None:
        methods["lookup_class_mro_attr"] = look_up
    return patch.multiple(UserDefinedObjectVariable, **methods)


def traced_file() -> str:
    """The file of the code being traced; empty outside of a trace."""
    from torch._guards import TracingContext

    stack = TracingContext.extract_stack()
    return stack[-1].filename if stack else ""


def returned_out_arguments() -> contextlib.AbstractContextManager[Any]:
    """Makes torch functions return the tensor of ``out=`` itself in traces of this thread.

    Dynamo returns a new variable, so ``self.u = torch.mul(a, b, out=self.u)`` seems to assign an attribute.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread, call = threading.get_ident(), TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result, out = call(self, tx, args, kwargs), kwargs.get("out")
        out = out.realize() if hasattr(out, "realize") else out
        is_out = isinstance(out, TensorVariable) and isinstance(result, TensorVariable)
        return out if is_out and threading.get_ident() == thread else result

    return patch.object(TorchInGraphFunctionVariable, "call_function", call_function)


def made_leaves() -> contextlib.AbstractContextManager[Any]:
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

    return patch.object(kind, "call_function", call_function)


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
